"""Who leads and who supervises a job, by leases and terms. Begin reading with `leading.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from insitu.base.lazy_exports import export_lazily

if TYPE_CHECKING:
    from insitu.cluster.leases import followed_head
    from insitu.cluster.leases.followed_head import Fields, FollowedHead
    from insitu.cluster.leases.job_leases import (
        JobLease,
        check_lost,
        claim_job,
        forget_job,
        is_outdated,
        keep_lease,
    )
    from insitu.cluster.leases.job_terms import (
        SECRET_BYTES,
        accept_term,
        begin_term,
        draw_term,
        encode_term,
        parse_term,
        read_term,
        write_term,
    )
    from insitu.cluster.leases.job_upkeep import JobUpkeep
    from insitu.cluster.leases.leading import NUMBER_KEY, OPTIONS_KEY, Lead, Won, parse_won, read_clock, win
    from insitu.cluster.leases.replacement_notices import (
        REPLACED_EXIT_CODE,
        ReplacementNotices,
        give_up_home,
        record_replacement,
    )

__getattr__, __dir__ = export_lazily(__name__)
