"""How much of a converted model's retrieval and perplexity comes back in minutes of one GPU.

    python scripts/recovery/gpu.py ORIGINAL OUT --text 'books/*.parquet' --novels novels.parquet --seconds 150

The model is calibrated on a million tokens, then all parameters are trained on the original's
predictions (KL). Half of the blocks are synthetic lookups, whose answers count twice; a quarter of
the tokens are in blocks of 8,192. Both models are measured in the same way (OUT/eval, for
`coca-eval report`).

Training is limited by time, so the learning rate follows the share of time spent.
OUT/distilled.jsonl has the losses and their cost. Weights are float32 and products bfloat16. The loop is the shortest
that uses a whole GPU for a small model; recipes/recover.yaml is the same for `coca-train`.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from coca_hf import convert_checkpoint
from coca_hf.documents import read_documents
from coca_hf.evaluate.copying import copying_rows
from coca_hf.evaluate.loaded_model import Rope, load_model
from coca_hf.evaluate.passkey import passkey_rows
from coca_hf.evaluate.position import position_rows
from coca_hf.evaluate.recall import recall_rows
from coca_hf.evaluate.rows import RowStore, Run
from coca_hf.evaluate.sample import draw_sample
from coca_hf.train.lookups import Lookups
from coca_hf.train.objectives import distillation_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = [2048, 2048, 2048, 8192]  # of the blocks of successive steps
NAME = "distilled"


class Batches(IterableDataset):
    """Token ids (b, n) and which of them are answers, (b, n), for every step; the same for any
    number of workers.
    """

    def __init__(self, documents: list[Tensor], tokenizer, tokens_a_step: int, seed: int):
        self.documents, self.tokens_a_step, self.seed = documents, tokens_a_step, seed
        self.maker = Lookups(tokenizer)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, apart = (worker.id, worker.num_workers) if worker else (0, 1)
        for step in count(first, apart):
            length = LENGTHS[step % len(LENGTHS)]
            rows = [
                self.row(length, step, number)
                for number in range(max(1, self.tokens_a_step // length))
            ]
            ids, answers = zip(*rows, strict=True)
            yield torch.tensor(ids), torch.tensor(answers)

    def row(self, length: int, step: int, number: int) -> tuple[list[int], list[bool]]:
        draw = random.Random(f"{self.seed} {step} {number}")
        text: list[int] = []
        while len(text) < length:
            document = self.documents[draw.randrange(len(self.documents))]
            start = draw.randrange(max(1, len(document) - length))
            text += document[start : start + length - len(text)].tolist()
        if number % 2:
            return self.maker.block(text, draw)
        return text, [False] * length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("original", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--novels", required=True)
    parser.add_argument(
        "--seconds", type=float, default=150.0, help="of training, calibration apart"
    )
    parser.add_argument("--constraint", default="slack")
    parser.add_argument("--keep-layers", type=int, nargs="*", default=[])
    parser.add_argument("--calibrate-tokens", type=int, default=524288)
    parser.add_argument("--tokens-a-step", type=int, default=32768)
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--measured-length", type=int, default=12288)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    measure(options.original, "original", options)
    began, directory = time.perf_counter(), options.out / NAME
    record = convert_checkpoint(
        str(options.original),
        directory,
        constraint=options.constraint,
        dtype="float32",
        keep_layers=options.keep_layers,
        overwrite=True,
        calibrate_on=options.text,
        calibrate_tokens=options.calibrate_tokens,
        device=DEVICE,
    )
    seconds, calibration = time.perf_counter() - began, record["calibration"]
    note(options, event="converted", seconds=seconds, calibration=calibration)
    train(directory, options)
    note(options, event="trained", seconds=time.perf_counter() - began)
    measure(directory, NAME, options)


def train(directory: Path, options) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    texts = (document.text for document in read_documents(options.text, skip_empty=True))
    documents = [torch.tensor(ids) for ids in tokenizer(list(texts), verbose=False)["input_ids"]]
    load = AutoModelForCausalLM.from_pretrained
    student = load(directory, dtype=torch.float32).to(DEVICE).train()
    teacher = load(options.original, dtype=torch.bfloat16).to(DEVICE).eval()
    dataset = Batches(documents, tokenizer, options.tokens_a_step, options.seed)
    workers = {"num_workers": options.workers, "pin_memory": DEVICE == "cuda"}
    batches = iter(DataLoader(dataset, batch_size=None, **workers))
    next(batches)  # wait until the workers run before the clock starts
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    began, tokens, sums = time.perf_counter(), 0, torch.zeros(2, device=DEVICE)
    for step in count(1):
        spent = (time.perf_counter() - began) / options.seconds
        if spent >= 1:
            break
        optimizer.param_groups[0]["lr"] = min(1.0, step / 20) * options.rate * (1 - spent)
        ids, answers = (x.to(DEVICE, non_blocking=True) for x in next(batches))
        sums += step_gradients(student, teacher, ids, answers)
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += ids.numel()
        if step % 50 == 0:
            loss, at_answers = (sums / 50).tolist()  # waits for the GPU, so the clock is right
            sums.zero_()
            seen = {"step": step, "tokens": tokens, "loss": loss, "answers": at_answers}
            note(options, **seen, norm=norm.item(), seconds=time.perf_counter() - began)
    note(options, step=step, tokens=tokens, seconds=time.perf_counter() - began)
    student.save_pretrained(directory)


def step_gradients(student, teacher, ids: Tensor, answers: Tensor) -> Tensor:
    """Accumulate the gradients of the mean loss plus the mean loss of answers; return both means.

    The loss of a token is KL(teacher || student) of its prediction.
    """
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = student(ids, use_cache=False).logits[:, :-1]
    asked = answers[:, 1:]
    with torch.no_grad():
        theirs = teacher(ids, use_cache=False).logits[:, :-1]
        at_answers = distillation_loss(ours[asked][None], theirs[asked][None]).nan_to_num()
    weights = 1 + asked * (asked.numel() / asked.sum().clamp(min=1))
    loss = distillation_loss(ours, theirs, weights=weights)
    loss.backward()
    return torch.stack((loss.detach() - at_answers, at_answers))


def measure(directory: Path, name: str, options) -> None:
    """Retrieval in 20 cases and perplexity by position, on novels that nothing was fitted on."""
    began = time.perf_counter()
    loaded = load_model(str(directory), dtype="float32", name=name)
    length = options.measured_length
    run, long = (
        Run(loaded, lengths, [Rope("default")], RowStore(options.out / "eval"))
        for lengths in (options.lengths, [length])
    )
    passages = draw_sample(
        loaded, options.novels, max(options.lengths), documents=20, special_tokens=False
    )
    whole = {"documents": 12, "skip_short": True, "max_tokens": length + 1}
    rows = [
        *copying_rows(run, num_cases=20),
        *copying_rows(run, num_cases=20, sample=passages),
        *recall_rows(run, num_cases=20),
        *passkey_rows(run, num_cases=20, variant="landmark"),
        *position_rows(long, draw_sample(loaded, options.novels, length, **whole)),
    ]
    for row in rows:
        keys = ("task", "data", "length", "value", "nll", "nats_per_digit", "ranges", "error")
        said = {key: row[key] for key in keys if row.get(key) is not None}
        print(name, json.dumps(said), flush=True)
    print(f"{name} measured in {time.perf_counter() - began:.0f} s", flush=True)


def note(options, **what) -> None:
    line = json.dumps({"way": NAME, **what})
    print(line, flush=True)
    with (options.out / f"{NAME}.jsonl").open("a") as log:
        log.write(line + "\n")


if __name__ == "__main__":
    main()
