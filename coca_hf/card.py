"""The model card: README.md beside the weights, written from the records there."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash
from huggingface_hub import ModelCard, ModelCardData

from coca_hf.errors import CocaError, library_errors
from coca_hf.files import replace_text
from coca_hf.models.hub import CARD, CONVERSION, TRAINING
from coca_hf.page import Bullets, Grid, escape, markdown
from coca_hf.weights import checkpoint_file, open_regular, read_json, read_record

# fields from the card of the base model
CARRIED_OVER = ("license", "license_name", "license_link", "language")
MARK = "<!-- written by coca_hf from conversion.json and training.json -->"
NOT_MEASURED = "Not measured yet."
RELEASED = "the released"  # begins the rule of a conversion of the authors' checkpoints
FRONT_MATTER_BYTES = 100_000
PIPELINES = {
    "CausalLM": "text-generation",
    "SequenceClassification": "text-classification",
    "TokenClassification": "token-classification",
}

_TEMPLATE = """---
{{ card_data }}
---
{{ mark }}

# {{ title }}

{{ lead }}

## Load

```python
from transformers import {{ auto_class }}, AutoTokenizer

checkpoint = "."  # this directory, or the id of this repository
tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=True)
model = {{ auto_class }}.from_pretrained(checkpoint, trust_remote_code=True)
```

With coca_hf installed, `import coca_hf` takes the place of `trust_remote_code=True`.

## Conversion

{{ conversion }}

## Training

{{ training }}

## Measured

{{ measured }}

## Versions

{{ versions }}
"""


def base_metadata(source: str, directory: Path) -> dict[str, Any]:
    """What a card says about the base model: `model`, if `source` is a hub id, and its own card's
    fields.

    directory: the files of `source`. The fields are those of `CARRIED_OVER` in the front matter of
    its README.md that are text or lists of text; a card that cannot be read has none.
    """
    found: dict[str, Any] = {} if Path(source).exists() else {"model": source}
    front_matter = _front_matter(directory)
    for field in CARRIED_OVER:
        value = front_matter.get(field)
        items = value if isinstance(value, list) else [value]
        if all(isinstance(item, str) for item in items):
            found[field] = value
    return found


def write_card(
    directory: Path,
    training: dict | None = None,
    measured: str | None = None,
    base_model: str | None = None,
) -> Path:
    """Write the card of the checkpoint in `directory` from its records; returns the path.

    training: the record that will be training.json; by default the file there. measured: Markdown
    tables of `coca-eval`'s measurements. base_model: the hub id of the model that was converted, if
    the records do not have it.

    Raises CocaError if there is no conversion.json, a record is not valid, or coca_hf did not write
    README.md.
    """
    path = directory / CARD
    if path.exists() and MARK[:-4] not in _beginning(path):
        raise CocaError(
            f"{path}: not written by coca_hf, and left as it is; move it to have a card made"
        )
    conversion = read_json(directory / CONVERSION)
    if training is None:
        training = read_record(directory / TRAINING)
    with library_errors(f"{directory}: its records are not what coca-convert and coca-train write"):
        card = make_card(conversion, training, measured, base_model)
    text = str(card)
    try:
        replace_text(path, text.replace(MARK, _mark(text)))
    except OSError as error:
        raise CocaError(f"{path}: cannot be written: {error.strerror}") from error
    return path


def measured_before(directory: Path) -> tuple[str | None, str | None]:
    """What an earlier `coca-eval card` wrote into README.md: the measured tables, and the base.

    Raises CocaError if it was changed since coca_hf wrote it: what was added would be lost.
    """
    path = directory / CARD
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    mark = re.search(re.escape(MARK[:-4]) + "; xxh3_64 [0-9a-f]{16} -->", text)
    if mark and mark[0] != _mark(text.replace(mark[0], MARK)):
        raise CocaError(
            f"{path}: was edited since coca_hf wrote it, and is left as it is; move it to have a new "
            "card made, and add your text to that"
        )
    found = re.search(r"\n## Measured\n\n(.*)\n\n## Versions\n", text, re.DOTALL)
    measured = found[1] if found and found[1] != NOT_MEASURED else None
    base = _front_matter(directory).get("base_model")
    return measured, base if isinstance(base, str) else None


def _mark(text: str) -> str:
    """The mark of a card whose text has `MARK` in its place."""
    digest = xxhash.xxh3_64_hexdigest(text.encode("utf-8"))
    return f"{MARK[:-4]}; xxh3_64 {digest} -->"


def make_card(
    conversion: dict, training: dict, measured: str | None = None, base_model: str | None = None
) -> ModelCard:
    """As `write_card`, from records. Raises whatever a damaged record causes."""
    base, stages = conversion.get("base", {}), training.get("stages", [])
    head = conversion.get("architecture", "ForCausalLM").partition("For")[2]
    base_id = base_model or base.get("model")
    sources = [source for stage in stages for source in stage["sources"] if source["on_hub"]]
    data_sets = dict.fromkeys(source["path"] for source in sources)
    untrained = "since it was converted" if _is_released(conversion) else "yet"
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=PIPELINES[head],
        base_model=base_id,
        tags=["coca", "long-context"],
        datasets=list(data_sets) or None,
        **{field: base[field] for field in CARRIED_OVER if field in base},
    )
    first = [*conversion.get("earlier", []), conversion][0]
    name = (base_id or Path(first["source"]).name).split("/")[-1]
    return ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        mark=MARK,
        auto_class=f"AutoModelFor{head}",
        title=f"{escape(name)} with CoCA",
        lead=_lead(conversion, stages, base_id or name),
        conversion=_conversion(conversion, base_id or name),
        training=_training(stages) if stages else f"Not trained {untrained}.",
        measured=measured or NOT_MEASURED,
        versions="\n".join(
            f"- {step}: {', '.join(map(' '.join, record['versions'].items()))}"
            for step, record in (("conversion", conversion), ("training", training))
            if record
        ),
    )


def _lead(conversion: dict, stages: list[dict], base: str) -> str:
    kept, conversions = conversion.get("kept_layers"), [*conversion.get("earlier", []), conversion]
    instead = "in place of its own" + (f" in all layers but {numbers(kept)}" if kept else "")
    how = f"{instead}, made with coca_hf"
    if _is_released(conversion):
        how = "as its authors trained it, in the layout of coca_hf"
    lines = [
        f"{escape(base)} with Collinear Constrained Attention "
        f"([CoCA](https://arxiv.org/abs/2309.08646), the {conversion['constraint']} form) {how}."
    ]
    if stages:
        lines.append(
            f"Tokens seen in CoCA training: {sum(stage['tokens'] for stage in stages):,}. The "
            "paper trained on 7.5 billion tokens in each of three stages."
        )
    elif any(one.get("calibration") for one in conversions):
        lines.append(
            "The attention is converted and calibrated, that is fitted to the original's on text. "
            "Retrieval from far back comes back with training."
        )
    elif any(map(needs_training, conversions)):
        lines.append("The attention is converted; it has to be trained before the model is useful.")
    if not conversion.get("base", {}).get("license"):
        lines.append("The licence is that of the base model, whose files did not name it.")
    return "\n\n".join(lines)


def needs_training(conversion: dict) -> bool:
    """Whether a record is of a conversion that gave layers another attention."""
    return not conversion["start"]["rule"].startswith(("none", RELEASED))


def _is_released(conversion: dict) -> bool:
    """Whether it, or the first of those before it, is of a checkpoint of the authors' code."""
    first = [*conversion.get("earlier", []), conversion][0]
    return first["start"]["rule"].startswith(RELEASED)


def _conversion(record: dict, base: str) -> str:
    """A list: what the last conversion did, and what earlier ones fitted and rotated otherwise."""
    parameters = record["parameters"]
    earlier, adapter = record.get("earlier", []), record.get("adapter", {})
    trained_on = f" (trained on {adapter['trained_on']})" if "trained_on" in adapter else ""
    source = Path(record["source"]).name if earlier else base
    lines = {
        "source": f"{source}, {record['source_format']}",
        "adapter": f"{adapter['name']}, merged{trained_on}" if adapter else None,
        "form": record["constraint"],
        "original attention": kept_in_words(record) if record.get("kept_layers") else None,
        "content pairs": content_in_words(record) or None,
        "dtype": record["dtype"],
        "parameters": f"{parameters['before']:,} before, {parameters['after']:,} after",
        "start of W_T": record["start"]["rule"],
        "date": record["date"],
    }
    items = [(key, value) for key, value in lines.items() if value is not None]
    for conversion in (*earlier, record):
        if rope := conversion.get("rope"):
            items.append(("RoPE", base_in_words(rope)))
        if calibration := conversion.get("calibration"):
            items.append(("calibration", _calibration(calibration, conversion)))
    return "\n".join(f"- {key}: {escape(value)}" for key, value in items)


def _calibration(calibration: dict, conversion: dict) -> str:
    return (
        f"W_Q, W_T and W_O fitted to the original's attention on {calibration['tokens']:,} tokens of "
        f"text and on repeated passages; {perplexity_in_words(calibration, conversion)}"
    )


def perplexity_in_words(calibration: dict, conversion: dict) -> str:
    """The perplexities of a `calibration` in the record of its conversion."""
    perplexity = calibration["perplexity"]
    return (
        f"perplexity on {calibration['held_out_tokens']:,} held-out tokens: "
        f"{perplexity['start']:,.4g} before, {perplexity['calibrated']:,.4g} after, "
        f"{perplexity['original']:,.4g} of the original"
        + (", all with the base from before" if "rope" in conversion else "")
    )


def kept_in_words(facts: dict) -> str:
    """The layers that keep the original's attention, and their window, from a record or a plan of
    conversion, or from `inspect_checkpoint`'s facts.
    """
    kept, window = facts["kept_layers"], facts.get("kept_window")
    if isinstance(kept, list):
        words, windowed = f"layers {numbers(kept)}", facts.get("windowed_layers", kept)
    else:  # a number or `auto`, before calibration
        words, windowed = f"the layers that calibration finds ({kept})", kept
    if not window:
        return words
    some = "" if windowed == kept else f"of which {numbers(windowed)} "
    return f"{words}, {some}over the last {window:,} tokens"


def content_in_words(facts: dict) -> str:
    """The content pairs, from a record or a plan of conversion, or from `inspect_checkpoint`'s
    facts; empty if there are none.
    """
    slowest, layers = facts.get("content_pairs"), facts.get("content_layers")
    words = [f"the {slowest} slowest of each head"] if slowest else []
    if layers:
        others = "others" if slowest else "pairs"
        which = f"layers {numbers(layers)}" if layers != "auto" else "those that calibration finds"
        words.append(f"every second of the {others} in {which}")
    return ", and ".join(words)


def base_in_words(rope: dict) -> str:
    """The NTK base that a conversion wrote, from its record or plan."""
    base = rope["rope_theta"]
    return (
        f"base {base['after']:,.0f} for {rope['ntk_length']:,} tokens, made from "
        f"{base['before']:,.0f} for {rope['trained_length']:,} by dynamic NTK, factor "
        f"{rope['factor']:g}"
    )


def _training(stages: list[dict]) -> str:
    """A table with a line per stage, and the data."""
    header = ["stage", "trains", "objective", "steps", "tokens", "block length", "learning rate"]
    header += ["last loss of the objective", "seconds", "hardware"]
    lines = [
        [
            stage["name"],
            _trained(stage),
            _objective(stage),
            f"{stage['steps']:,}",
            f"{stage['tokens']:,}",
            str(stage["seq_len"]),
            f"{stage['learning_rate']:g}",
            "" if stage["final_loss"] is None else f"{stage['final_loss']:.3f}",
            f"{stage['seconds']:,.0f}" if "seconds" in stage else "",  # older records lack it
            f"{stage['hardware']['processes']} x {stage['hardware']['device']}",
        ]
        for stage in stages
    ]
    table = markdown(Grid(header, lines, numbers_from=len(header)))
    sources = dict.fromkeys(_source(source) for stage in stages for source in stage["sources"])
    dtype = "Training keeps the weights in float32, whatever their dtype before."
    return f"{table}\n\n{dtype}\n\nData:\n\n{markdown(Bullets([*sources]))}"


def _trained(stage: dict) -> str:
    names = stage["train"] if stage["train"] == "all" else ", ".join(stage["train"])
    return f"LoRA r {stage['lora']['r']} on {names}" if "lora" in stage else names


def _objective(stage: dict) -> str:
    """What a stage minimised, with weights other than 1, and its teacher. Defaults are not in the
    record; empty if none of it is.
    """
    if "teacher" not in stage:  # older records lack it
        return ""
    weights = {**stage.get("objective", {"lm": 1}), "answers": stage.get("answer_weight", 0)}
    terms = [
        name if weight == 1 else f"{weight:g} {name}" for name, weight in weights.items() if weight
    ]
    teacher = f", teacher {stage['teacher']}" if stage.get("teacher") else ""
    return " + ".join(terms) + teacher


def _source(source: dict) -> str:
    name = source["path"] if source["on_hub"] else Path(source["path"]).name
    return f"{name}, weight {source['weight']:g}"


def _beginning(path: Path) -> str:
    with open_regular(path) as stream:
        return stream.read(FRONT_MATTER_BYTES).decode("utf-8-sig", errors="replace")


def _front_matter(directory: Path) -> dict:
    try:
        text = _beginning(checkpoint_file(directory, CARD))
        match = re.match(r"---\s*\n(.*?)\n---\s*(\n|$)", text, re.DOTALL)
        return ModelCard(match[0]).data.to_dict() if match else {}
    except Exception:  # YAML readers raise errors of their own
        return {}


def numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
