"""Prints as JSON what TensorBoard's own reader finds in a folder of event files: {tag: [[step, value], …]}; values as the text of a
float. Exits with 77 where TensorBoard is not installed."""
import json
import sys

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, TENSORS, SCALARS
except ImportError:
    sys.exit(77)

events = EventAccumulator(sys.argv[1], size_guidance={SCALARS: 0, TENSORS: 0})
events.Reload()
print(json.dumps({tag: [[event.step, repr(event.value)] for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
