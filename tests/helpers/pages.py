"""Python blocks of the pages of the documentation."""

import re

BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\n```text\n(?P<output>.*?)^```$)?", re.DOTALL | re.MULTILINE)
MANY_STEPS = re.compile(r"(num_steps=|\"num_steps\": |max_iter=|in range\()(?:\d{3,}\b|\"auto\")")


def shortened(code):
    """A block with few steps in place of many."""
    return MANY_STEPS.sub(r"\g<1>5", code)
