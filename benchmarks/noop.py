"""Workflows whose handlers do nothing, for benchmarks/end_to_end.py."""

from __future__ import annotations

from flowforge import Context, Workflow

single = Workflow("bench_single")
chain = Workflow("bench_chain")


@single.task
def only(ctx: Context) -> None:
    """Nothing."""


def _link(ctx: Context) -> None:
    """Nothing."""


for _n in range(100):
    chain.task(name=f"t{_n}", after=[f"t{_n - 1}"] if _n else [])(_link)
