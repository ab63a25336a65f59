"""The model card that every stage writes beside its weights."""

from huggingface_hub import ModelCard

from tests.train.results import record

LEARNING_RATES = {"1-k": "0.001", "2-qkv": "0.001", "3-full": "0.0005"}


def test_every_stage_has_a_card_with_all_stages_up_to_it(unbroken):
    for number, stage in enumerate(LEARNING_RATES, 1):
        card = ModelCard.load(unbroken / stage / "README.md")
        kept, lines = record(unbroken / stage), card.text.splitlines()
        rows = [line for line in lines if line.startswith(("| k |", "| qkv |", "| full |"))]
        assert len(rows) == len(kept["stages"]) == number
        assert f"| {kept['final_loss']:.3f} | {kept['seconds']:,.0f} |" in rows[-1]
        assert f"| {kept['tokens']} | 20 | {LEARNING_RATES[stage]} |" in rows[-1]
        assert sum(summary["tokens"] for summary in kept["stages"]) == kept["tokens_seen"]
        assert kept["stages"][-1]["seconds"] == kept["seconds"] > 0
        assert f"Tokens seen in CoCA training: {kept['tokens_seen']:,}." in card.text
        assert "- digits.jsonl, weight 1" in card.text
        assert "trained before" not in card.text
    assert "q\\_proj, t\\_proj, v\\_proj" in card.text
