"""`accelerate launch -m coca_hf.train RECIPE …` is `coca-train RECIPE …` on every process."""

from coca_cli.main import train

train()
