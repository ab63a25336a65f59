"""What a recipe may say, and the refusal of anything else."""

import os

import pytest
import yaml
from transformers import TrainingArguments

from coca_hf import CocaError
from coca_hf.train.recipe import load_recipe, recipe_text


def test_a_stage_overrides_the_shared_training_options(recipe_path):
    recipe = load_recipe(recipe_path)
    rates = [recipe.trainer_options(stage)["learning_rate"] for stage in recipe.stages]
    assert rates == [1e-3, 1e-3, 5e-4]


def test_defaults_are_filled_in(recipe_tree, tmp_path):
    training = recipe_tree.pop("training")
    for stage in recipe_tree["stages"]:
        stage["learning_rate"] = training["learning_rate"]
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe_tree))
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.training["report_to"] == ["tensorboard"]
    source = recipe.data.sources[0]
    assert (recipe.data.seed, source.column, source.split) == (0, "text", "train")


def test_numbers_without_a_dot_are_numbers_at_every_depth(recipe_tree, tmp_path):
    text = yaml.safe_dump(recipe_tree).replace("learning_rate: 0.0005", "learning_rate: 5e-4")
    bounds = "training:\n  lr_scheduler_kwargs: {start_lr: 1e-7, end_lr: '1e-5'}"
    text = text.replace("training:", bounds, 1)
    (tmp_path / "r.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "r.yaml")
    assert recipe.trainer_options(recipe.stages[2])["learning_rate"] == 5e-4
    assert recipe.training["lr_scheduler_kwargs"]["start_lr"] == 1e-7


def test_no_is_a_word_and_yes_is_true_and_null_is_none_where_they_may_be(recipe_path):
    settings = ["save_strategy=no", "bf16=yes", "neftune_noise_alpha=null"]
    recipe = load_recipe(recipe_path, [f"training.{setting}" for setting in settings])
    names = ("save_strategy", "bf16", "use_cpu", "neftune_noise_alpha")
    assert [recipe.training[name] for name in names] == ["no", True, True, None]


def test_overrides_reach_stages_by_name_and_sources_by_number(recipe_path):
    settings = ["training.learning_rate=2e-4", "data.seq_len=32", "data.sources.1.weight=7"]
    settings += ["stages.full.max_steps=10", "stages.k.train=[k_proj, o_proj]", "model=elsewhere"]
    settings += ["training.lr_scheduler_kwargs.end_lr=1e-6"]
    recipe = load_recipe(recipe_path, settings)
    assert recipe.training["learning_rate"] == 2e-4
    found = (recipe.data.seq_len, recipe.data.sources[1].weight, recipe.model)
    assert found == (32, 7, "elsewhere")
    assert recipe.trainer_options(recipe.stages[2])["max_steps"] == 10
    assert recipe.stages[0].train == ["k_proj", "o_proj"]
    assert recipe.training["lr_scheduler_kwargs"] == {"end_lr": 1e-6}


def test_an_override_of_a_key_of_one_stage_keeps_the_keys_that_all_stages_have(recipe_path):
    settings = ["training.lr_scheduler_kwargs={start_lr: 1e-7, end_lr: 1e-6}"]
    recipe = load_recipe(recipe_path, [*settings, "stages.k.lr_scheduler_kwargs.end_lr=0"])
    found = [recipe.trainer_options(stage)["lr_scheduler_kwargs"] for stage in recipe.stages[:2]]
    assert found == [{"start_lr": 1e-7, "end_lr": 0}, {"start_lr": 1e-7, "end_lr": 1e-6}]


def test_an_override_of_one_objective_keeps_the_default_one_beside_it(recipe_path):
    recipe = load_recipe(recipe_path, ["teacher=original", "stages.k.objective.distill=0.5"])
    assert recipe.stages[0].objective == {"lm": 1.0, "distill": 0.5}
    assert recipe.stages[1].objective == {"lm": 1.0}


def test_of_overrides_the_later_one_counts_and_may_be_inside_an_earlier_one(recipe_path):
    settings = [STAGES, "stages.a.max_steps=7", "data.seed=1", "data.seed=2", "data.seq_len=30"]
    recipe = load_recipe(recipe_path, settings)
    found = (recipe.trainer_options(recipe.stages[0])["max_steps"], recipe.data.seed)
    assert found == (7, 2)


ALIASES = {
    "a mapping": ("lr_scheduler_kwargs: &a {end_lr: 1e-6}", "lr_scheduler_kwargs: *a"),
    "a stage": ("<<: &a {lr_scheduler_kwargs: {end_lr: 1e-6}}", "<<: *a"),
}


@pytest.mark.parametrize("kind", ALIASES)
def test_an_override_of_one_stage_leaves_others_alone_that_share_its_lines(
    recipe_tree, tmp_path, kind
):
    text = yaml.safe_dump(recipe_tree, sort_keys=False)
    for name, line in zip(("k", "qkv"), ALIASES[kind], strict=True):
        text = text.replace(f"- name: {name}\n", f"- name: {name}\n  {line}\n")
    (tmp_path / "r.yaml").write_text(text)
    recipe = load_recipe(tmp_path / "r.yaml", ["stages.qkv.lr_scheduler_kwargs.end_lr=0"])
    found = [recipe.trainer_options(stage)["lr_scheduler_kwargs"] for stage in recipe.stages[:2]]
    assert found == [{"end_lr": 1e-6}, {"end_lr": 0}]


def test_a_recipe_may_come_from_a_pipe(recipe_path):
    read, write = os.pipe()
    os.write(write, recipe_path.read_bytes())
    os.close(write)
    piped = load_recipe(f"/dev/fd/{read}", ["data.seed=3"])
    assert piped == load_recipe(recipe_path, ["data.seed=3"])
    os.close(read)


@pytest.mark.parametrize("written", [recipe_text, lambda recipe: yaml.safe_dump(recipe.to_dict())])
def test_a_recipe_written_out_is_the_same_recipe(recipe_path, tmp_path, written):
    settings = ["training.lr_scheduler_kwargs.start_lr=1e-7", "training.save_strategy=steps"]
    recipe = load_recipe(recipe_path, [*settings, r'training.run_name="a\x85b é"'])  # a next line
    assert recipe.training["run_name"] == "a\x85b é"
    (tmp_path / "again.yaml").write_text(written(recipe), encoding="utf-8")
    assert load_recipe(tmp_path / "again.yaml") == recipe


LOOKUPS = "data.sources=[{path: x, weight: 1}, {synthetic: lookups, weight: 1}]"
FUSED, SHARED = "training.fused_cross_entropy=true", "training.context_parallel_size=2"
ATTENTION, DISTILL = "training.attn_implementation", ("teacher=x", "stages.k.objective=distill")
ANSWERS = (LOOKUPS, "stages.k.answer_weight=1")
STAGES = "stages=[{name: a, train: all, max_steps: 9}]"
SKIPPING = ("data.seq_len=40", "data.skip_positions=2000")
BAD_SETTINGS = {  # or several together
    "modle=x": "unknown key 'modle'; nearest: model",
    "fused_cross_entropy=true": "here; it is a training option: give training.fused_cross_entropy",
    "training.learning_rat=1": "training: unknown key 'learning_rat'; nearest: learning_rate",
    "stages.qkv.max_step=1": "stages.qkv: unknown key 'max_step'; nearest: max_steps",
    "stages.qkv.trian=all": "stages.qkv: unknown key 'trian'; nearest: train",
    "training.lr_scheduler_kwargs.end_rl=1": "unknown key 'end_rl'; nearest: end_lr",
    "stages.ful.max_steps=1": "got 'ful', expected one of k, qkv, full; nearest: full",
    "data.sources.2.weight=1": "got '2', expected one of 0, 1; nearest",
    "model.name=x": "the path goes through",
    "verbose": "expected key=value",
    "training.learning_rate=fast": "learning_rate: got 'fast', expected float",
    "training.learning_rate=true": "learning_rate: got True, expected float",
    "data.seq_len=long": "data.seq_len: got 'long', expected a valid integer",
    "data.seq_len=100000000000000000000": "data.seq_len: got 100000000000000000000, expected less than",
    "model=''": "model: got '', expected a name",
    "teacher=''": "teacher: got '', expected a name",
    "data.seed=true": "data.seed: got True, expected a valid integer",
    "data.sources.0.weight=true": "data.sources.0.weight: got True, expected a number",
    "stages.k.answer_weight=true": "stages.k.answer_weight: got True, expected a number",
    "stages.k.objective={lm: true}": "stages.k.objective.lm: got True, expected a number",
    "stages.k.lora={r: true, alpha: 1}": "stages.k.lora.r: got True, expected a valid integer",
    "stages.k.lora={r: 1, alpha: true}": "stages.k.lora.alpha: got True, expected a number",
    "data.held_out_blocks=true": "data.held_out_blocks: got True, expected a valid integer",
    "data.sources.0.weight=1e308": "data.sources.0.weight: got 1e+308, expected less than or equal to",
    "data.sources=[]": "data.sources: got [], expected one or more",
    "data.sources=[{synthetic: lookup, weight: 1}]": "data.sources.0.synthetic: got 'lookup', expected 'lookups'",
    "data.sources.0.synthetic=lookups": "data.sources.0: expected either path, of documents, or synthetic: lookups",
    "data.sources=[{synthetic: lookups, weight: 1, column: code}]": "data.sources.0: got column beside synthetic",
    "data.sources=[{synthetic: lookups, weight: 1}]": "data: got synthetic sources alone, expected documents beside",
    "data.skip_positions=20": "data: got skip_positions 20, expected more than seq_len, 20",
    "data.skip_positions=64": "data: got skip_positions with seq_len 20, expected a seq_len of at ",
    "stages.k.answer_weight=1": "stages.k: got answer_weight 1 without a source that has answers; add {synthetic: lo",
    "training=fast": "training: got 'fast', expected a mapping",
    "training.output_dir=x": "'output_dir' is not a recipe's to set: results lie in OUT",
    "training.eval_steps=5": "evaluate the result with coca-eval",
    "training.num_train_epochs=2": "give max_steps",
    "training.save_on_each_node=true": "all machines see OUT, which the main process writes",
    "training.save_strategy=epoch": "there are no epochs",
    "training.save_total_limit=0": "stages.k: got save_total_limit 0, expected at least 1",
    "training.ddp_timeout=0": "stages.k: got ddp_timeout 0, expected at least 1",
    "training.lr_scheduler_type=greedy": "stages.k: got lr_scheduler_type 'greedy', expected a schedule",
    "training.log_level_replica=loud": "stages.k: got log_level_replica 'loud', expected one of detail, debug",
    "training.torch_compile_backend=fast": "stages.k: got torch_compile_backend 'fast', expected one of no",
    "training.neftune_noise_alpha=-1": "got neftune_noise_alpha -1.0, expected at least 0",
    "training.torch_compile_mode=fast": "got torch_compile_mode 'fast', expected one of default",
    "training.gradient_checkpointing_kwargs={reentrant: true}": "unknown key 'reentrant'; nearest: use_reentrant",
    "training.dataloader_num_workers=1": "is not a recipe's to set: blocks are read from disk as they are",
    "stages.k.max_steps=0": "stages.k: got max_steps 0, expected a number above 0",
    "stages.k.name=full": "got two of the name 'full'",
    "stages.k.name=a/b": "stages.a/b.name: got 'a/b'",
    "training.max_steps=1:30": "max_steps: got '1:30', expected int",
    "stages.k.max_steps=!!int x": "not YAML: invalid literal",
    f"training.learning_rate=0x{'f' * 5000}": "got a very large int, expected float",
    "training.bf16=!!bool x": "not YAML: a value does not fit its tag",
    "training.seed=!!int ''": "not YAML: a value does not fit its tag",
    "data.seed=!!timestamp x": "line 1: not YAML: failed to construct timestamp",
    "training.label_smoothing_factor=0.1": "losses are compared across stages",
    f"stages.k.train={'[' * 500}": "nested too deeply",
    f"training.max_steps={list(range(5000))}": "max_steps: got [0, 1, 2, 3, 4, 5, ...], expected int",
    "training.seed=-1": "got seed -1, expected 0 to 2^32 - 1",
    "stages.k.seed=4294967296": "stages.k: got seed 4294967296, expected 0 to 2^32 - 1",
    f"training.seed={'9' * 5000}": "not YAML: Exceeds the limit",
    f"training.{'x' * 5000}=1": "nearest:",
    "training.lr_scheduler_kwargs={end_lr: true}": "end_lr: got True, expected a number",
    "training.lr_scheduler_kwargs=fast": "lr_scheduler_kwargs of a linear schedule: got 'fast', expected a mapping",
    "training.lr_scheduler_kwargs={start_lr: 0.002}": "stages.k: got start_lr 0.002 of lr_scheduler_kwargs, "
    "expected at most the learning_rate, 0.001; lower it too",
    "training.lr_scheduler_kwargs={end_lr: 6e-4}": "stages.full: got end_lr 0.0006 of lr_scheduler_kwargs, expected at",
    "stages.k.train=most": "stages.k.train: got 'most', expected all or a list of module names",
    "stages.k.lora.rank=3": "stages.k.lora: unknown key 'rank'; nearest: r",
    "training.max_steps=3": "changes nothing, because every stage has its own; override stages.k.max_steps instead",
    "training.bf16_full_eval=true": "coca-train only trains; evaluate the result with coca-eval",
    "training.dataloader_drop_last=true": "coca-train deals out the blocks itself",
    "stages.k.objective=distill": "stages.k: objective distill needs the original model",
    "stages.k.objective=distil": "stages.k.objective.distil: got 'distil', expected 'lm' or 'distill'",
    "stages.k.objective={}": "stages.k.objective: got {}, expected one or more",
    (FUSED, *DISTILL): "got fused_cross_entropy with objective distill, which needs the logits",
    (FUSED, *ANSWERS): "got fused_cross_entropy with answer_weight, wh",
    "training.use_liger_kernel=true": "give fused_cross_entropy: true",
    "training.liger_kernel_config={rope: true}": "give fused_cross_entropy: true",
    "training.optim_target_modules=[q_proj]": "only GaLore and APOLLO have them, which cannot continue a",
    "training.include_for_metrics=[loss]": "coca-train only trains; evaluate the result with coca-eval",
    "stages.k.fsdp=full_shard": "shard with FSDP2, through `accelerate launch`",
    "training.fsdp_config={version: 1}": "shard with FSDP2, through `accelerate launch`",
    (SHARED, f"{ATTENTION}=null", *DISTILL): "2 with objective distill, expected lm",
    (SHARED, *DISTILL): "context_parallel_size 2 with objective distill, expected lm alone",
    (SHARED, *ANSWERS): "with objective lm and answer_weight, expected lm",
    (SHARED, f"{ATTENTION}=eager"): "2 with attn_implementation eager, expected sdpa",
    (SHARED, *SKIPPING): "2 with data.skip_positions, expected positions in order",
    "stages.k.tf32=true": "stages.k: got tf32; torch has one setting for all stages: give training.tf32",
    ("stages.k.max_steps=1", STAGES): "stages.k.max_steps=1: changes nothing, "
    "because stages=... replaces it; give it after stages=..., or leave it out",
    (
        "data.sources.0.weight=5",
        "data.seq_len=8",
        LOOKUPS,
    ): "data.sources.0.weight=5: changes nothing, because",
    (SHARED, "data.seq_len=70"): "2 with data.seq_len 70; expected a multiple of 4",
}

if "activation_checkpointing" in TrainingArguments.__dataclass_fields__:  # not in transformers 5.17
    BOTH = ("training.gradient_checkpointing=true", "stages.k.activation_checkpointing=false")
    BAD_SETTINGS[BOTH] = (
        "stages.k: got gradient_checkpointing True, expected one of it and activation"
    )


@pytest.mark.parametrize("setting", BAD_SETTINGS, ids=lambda setting: str(setting)[:60])
def test_a_bad_setting_is_one_clear_line(recipe_path, setting):
    message = BAD_SETTINGS[setting]
    with pytest.raises(CocaError) as caught:
        load_recipe(recipe_path, [setting] if isinstance(setting, str) else setting)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


BAD_FILES = {
    None: "cannot be read as a recipe: No such file",
    "[1, 2]": "got list, expected a recipe",
    "model: [": "line 1: not YAML",
    "model: a\nmodel: b\n": 'line 2: not YAML: found duplicate key "model"',
    "model: !!bool a": "r.yaml: not YAML: a value does not fit its tag",
    "model: a\n": "data: missing",
    "{model: a, data: {seq_len: 8, sources: [{path: x, weight: 1}]}, stages: [{name: k, train: all}]}": "above 0",
}


@pytest.mark.parametrize(("text", "message"), BAD_FILES.items(), ids=BAD_FILES.values())
def test_a_file_that_is_not_a_recipe_is_one_clear_line(tmp_path, text, message):
    if text is not None:
        (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(CocaError, match=r"r\.yaml") as caught:
        load_recipe(tmp_path / "r.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_typo_ends_the_command_with_code_2_and_makes_nothing(
    recipe_path, tmp_path, coca_train, capsys
):
    assert coca_train(recipe_path, "--out", tmp_path / "out", "training.learning_rat=1") == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_an_out_that_is_not_utf8_ends_the_command_with_code_2_and_makes_nothing(
    recipe_path, tmp_path, coca_train, capsys
):
    out = tmp_path / "\udce9"  # a byte of another encoding
    assert coca_train(recipe_path, "--out", out) == 2
    assert "got a name that is not UTF-8" in capsys.readouterr().err
    assert not out.exists()


def test_valid_yaml_brings_no_warnings_of_several_lines(tmp_path, recwarn):
    for text in ("a: &x 1\nb: &x 2", "%YAML 1.1\n---\na: 1e-4"):
        (tmp_path / "r.yaml").write_text(text)
        with pytest.raises(CocaError):
            load_recipe(tmp_path / "r.yaml")
    assert not recwarn.list
