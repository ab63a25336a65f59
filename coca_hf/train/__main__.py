"""`accelerate launch -m coca_hf.train RECIPE …` is `coca-train RECIPE …` on every process."""

from coca_hf.cli import train

train()
