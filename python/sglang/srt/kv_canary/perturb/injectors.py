"""Faults that can be planted in a running engine, by name.

Each does the damage of a real fault (`docs/kv_canary.md` names the cases) and returns
it, or None where the scene offers no opportunity. All of them are memory-safe.
"""

from __future__ import annotations

from collections.abc import Mapping

from kv_canary.checks import Reason
from sglang.srt.kv_canary.perturb.injector import Injector, When
from sglang.srt.kv_canary.perturb.input_injectors import (
    alias_row,
    change_input,
    flip_table_entry,
    recycle_row,
    shift_view,
    shorten_view,
    write_into_foreign_prefix,
    write_into_own_prefix,
)
from sglang.srt.kv_canary.perturb.kv_injectors import (
    flip_cached_kv,
    flip_kv_after_write,
    flip_record,
    flip_used_kv,
    free_early,
    move_without_bytes,
    move_without_records,
    swap_cached_prefixes,
)

_READ = (
    Reason.VERIFY_LINEAGE
    | Reason.VERIFY_POSITION
    | Reason.VERIFY_TOKEN
    | Reason.VERIFY_FREED
    | Reason.READ_SET
)

INJECTORS: Mapping[str, Injector] = {
    "req_to_token": Injector(
        apply=flip_table_entry, reasons=_READ | Reason.READ_SCRATCH
    ),
    "alias_row": Injector(apply=alias_row, reasons=_READ),
    "recycle_row": Injector(apply=recycle_row, reasons=_READ | Reason.WRITE_FOREIGN),
    "real_kv_used": Injector(apply=flip_used_kv, reasons=Reason.VERIFY_REAL_KV),
    "real_kv_post_forward": Injector(
        apply=flip_kv_after_write,
        reasons=Reason.VERIFY_REAL_KV,
        when=When.AFTER_FORWARD,
    ),
    "real_kv_unused_cache": Injector(
        apply=flip_cached_kv, reasons=Reason.VERIFY_REAL_KV
    ),
    "record": Injector(apply=flip_record, reasons=Reason.VERIFY_TORN),
    "early_free": Injector(apply=free_early, reasons=Reason.VERIFY_FREED),
    "move_without_records": Injector(
        apply=move_without_records, reasons=Reason.VERIFY_FREED
    ),
    "move_without_bytes": Injector(
        apply=move_without_bytes, reasons=Reason.VERIFY_REAL_KV
    ),
    "write_foreign": Injector(
        apply=write_into_foreign_prefix, reasons=Reason.WRITE_FOREIGN
    ),
    "write_own_prefix": Injector(
        apply=write_into_own_prefix, reasons=Reason.WRITE_FOREIGN
    ),
    "input_token": Injector(apply=change_input, reasons=Reason.WRITE_TOKEN),
    "shift_view": Injector(
        apply=shift_view, reasons=Reason.READ_SET | Reason.READ_SCRATCH
    ),
    "shorten_view": Injector(apply=shorten_view, reasons=Reason.READ_SCRATCH),
    "phantom_prefix": Injector(
        apply=swap_cached_prefixes,
        reasons=Reason.VERIFY_TOKEN | Reason.VERIFY_LINEAGE,
    ),
}
