"""The findings of a forward, as they travel to the host.

```
findings, int64 [STATUS_WORDS + R]

 0            1              STATUS_WORDS          STATUS_WORDS + R
 | in the ring | counters      | verdicts of the rows |
```
In the ring: entries, dropped ones included. Counters by `records.Counter`. A verdict:
reasons, 0 where nothing is wrong. On the host they are a list of words.
"""

from __future__ import annotations

from kv_canary.records import NUM_COUNTERS

STATUS_WORDS = 1 + NUM_COUNTERS
"""Words of findings before the verdicts."""


def counters_of(words: list[int]) -> list[int]:
    """The device's counters as of the end of the forward."""
    return words[1:STATUS_WORDS]


def verdicts_of(words: list[int]) -> list[int]:
    """Reasons per row of the forward."""
    return words[STATUS_WORDS:]


def is_clean(words: list[int]) -> bool:
    """Whether nothing was found."""
    return not (words[0] or any(words[STATUS_WORDS:]))
