"""The head under FSDP2: what a rank receives where the weight is gathered, and where hidden states are (``shard_over``).

Arithmetic on sizes, for bf16: every rank gets the same answer. A rank receives the other T - 1 parts of what it gathers, and as
many bytes in a reduce-scatter.

Letters: T ranks that split the weight, N tokens of each, V the vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

from cce_dist.plan.devices import Device
from cce_dist.plan.layers import Layout
from cce_dist.plan.sizes import Model
from cce_dist.report import table

MIB = 2**20


class Ways(NamedTuple):
    """Bytes of a rank and a microbatch.

    Attributes:
        weight: Received where FSDP2 gathers the weight, and scatters its gradient.
        hidden: Received with ``shard_over``.
        embedding: Received for a tied embedding, in addition to ``hidden``.
        held_less: Weight and gradient that are never whole with ``shard_over``.
    """

    weight: int
    hidden: int
    embedding: int
    held_less: int

    @property
    def pays(self) -> bool:
        """Whether ``shard_over`` receives no more; it holds less in any case."""
        return self.hidden + self.embedding <= self.weight


def ways(model: Model, num_tokens: int, num_ranks: int, gathers: int = 1, reduce_bytes: int = 4) -> Ways:
    """Return the bytes of both ways.

    Args:
        model: Its sizes.
        num_tokens: N, of a microbatch of a rank.
        num_ranks: T.
        gathers: How often FSDP2 gathers the weight: once if it stays until backward, else twice.
        reduce_bytes: Of an element of the gradient that FSDP2 scatters.
    """
    others = num_ranks - 1
    others_rows = model.vocab_size * model.hidden_size * others // num_ranks
    others_hidden = 2 * others * num_tokens * model.hidden_size
    # For each token 3 statistics of every shard, a label, and a coefficient.
    numbers = (12 * num_ranks + 8 + 4) * others * num_tokens
    return Ways(
        weight=(2 * gathers + reduce_bytes) * others_rows,
        hidden=3 * others_hidden + numbers,
        embedding=2 * others_hidden + 8 * others * num_tokens if model.is_tied else 0,
        held_less=(2 + 2) * others_rows,
    )


def paragraphs(model: Model, layout: Layout, device: Device) -> list[str]:
    """Say what both ways cost where data-parallel ranks split the weight and nothing else does; else say nothing."""
    if layout.zero_stage < 3 or layout.dp < 2 or layout.tp * layout.pp > 1:
        return []
    found = ways(model, layout.num_tokens, layout.dp)

    def row(way: str, received: int, held: int) -> dict[str, str]:
        links = {"a node": device.bus, "nodes": device.network}
        times = {f"ms, link of {name}": f"{received / rate * 1e3:.2f}" for name, rate in links.items()}
        return {"way": way, "MiB received": f"{received / MIB:,.0f}", **times, "MiB held less": f"{held / MIB:,.0f}"}

    rows = [
        row("weight gathered", found.weight, 0),
        row("hidden states gathered (shard_over)", found.hidden + found.embedding, found.held_less),
    ]
    advice = "fewer bytes" if found.pays else "more bytes, for memory alone"
    return [f"The head under FSDP2, {layout.dp} ranks: shard_over receives {advice}:\n" + "\n".join(table(rows))]
