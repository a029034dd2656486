"""The findings of a forward, in the form that travels to the host.

```
findings, int64 [STATUS_WORDS + R]

 0          RING          STATUS_WORDS           STATUS_WORDS + R
 | counters | in the ring | verdicts of the rows |
```
Counters are indexed by `records.Counter`. The ring word counts its entries, including
dropped ones. A verdict holds a row's reasons. From RING on everything is 0 if nothing
is wrong, so the findings of several groups or ranks can be united there. On the host
they are a list of words.
"""

from __future__ import annotations

from kv_canary.records import NUM_COUNTERS

RING = NUM_COUNTERS
STATUS_WORDS = RING + 1
"""Words of findings before the verdicts."""


def parse_counters(words: list[int]) -> list[int]:
    """Return the device's counters at the end of the forward."""
    return words[:RING]


def parse_verdicts(words: list[int]) -> list[int]:
    """Return the reasons of each row of the forward."""
    return words[STATUS_WORDS:]


def is_clean(words: list[int]) -> bool:
    """Whether nothing was found."""
    return not any(words[RING:])
