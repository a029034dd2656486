"""The findings of a forward, as they travel to the host.

```
findings, int64 [STATUS_WORDS + R]

 0          RING          STATUS_WORDS           STATUS_WORDS + R
 | counters | in the ring | verdicts of the rows |
```
Counters by `records.Counter`. In the ring: entries, dropped ones included. A verdict:
reasons, 0 where nothing is wrong. From RING on all is 0 where nothing is wrong, so that
findings of several groups or ranks are united there. On the host they are a list of
words.
"""

from __future__ import annotations

from kv_canary.records import NUM_COUNTERS

RING = NUM_COUNTERS
STATUS_WORDS = RING + 1
"""Words of findings before the verdicts."""


def counters_of(words: list[int]) -> list[int]:
    """The device's counters as of the end of the forward."""
    return words[:RING]


def verdicts_of(words: list[int]) -> list[int]:
    """Reasons per row of the forward."""
    return words[STATUS_WORDS:]


def is_clean(words: list[int]) -> bool:
    """Whether nothing was found."""
    return not any(words[RING:])
