"""All measurements, in the order of the page."""

from coca_hf.evaluate import (
    attention_maps,
    boundary,
    copying,
    layers,
    passkey,
    perplexity,
    position,
    recall,
    speed,
    tasks,
)

MODULES = (
    *(perplexity, position, passkey, copying, recall, attention_maps, layers, boundary),
    *(tasks, speed),
)
MEASUREMENTS = {module.MEASUREMENT.task: module.MEASUREMENT for module in MODULES}
