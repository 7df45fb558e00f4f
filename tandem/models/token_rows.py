"""Trained rows of an embedding and a vocabulary head, in place of the frozen ones.

A base model has never seen the control tokens of a chat template, and adapters on its layers cannot
teach it their embeddings, or to write the token that ends a turn. The matrix stays frozen, in its
type, quantized or shared; the rows stand beside it, as PEFT's `trainable_token_indices` has them:
their values replace the matrix's, and are not added to them. A tied head has the embedding's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tandem.models.modes import AdapterSwitch

LookUp = Callable[[Tensor, Tensor], Tensor]
"""Ids and a matrix (K, D) to rows."""
Multiply = Callable[[Tensor, Tensor], Tensor]
"""x (..., D) and a matrix (K, D) to (..., K)."""


class TokenRows(nn.Module):
    """The rows, beside the matrix that they replace rows of.

    Attributes:
        weight: (K, D), trained.
        token_ids: (K,) int64, ascending: the tokens that they are of.
        switch: whether they act; off, the matrix's own do, or `start`.
        start: (K, D), what acts while the switch is off; None: the matrix's own rows.
    """

    token_ids: Tensor
    start: nn.Parameter | None

    def __init__(self, token_ids: Sequence[int], width: int, device: torch.device) -> None:
        """Rows without values: `token_layers.start_token_rows` copies the matrix's."""
        super().__init__()
        ids = sorted(set(token_ids))
        self.weight = nn.Parameter(torch.empty(len(ids), width, device=device))
        on_host = "cpu" if device.type == "meta" else device
        self.register_buffer("token_ids", torch.tensor(ids, device=on_host), persistent=False)
        self.register_parameter("start", None)
        self.switch = AdapterSwitch()

    def keep_start(self) -> None:
        """Keep a frozen copy of the rows, which acts while the switch is off."""
        self.start = nn.Parameter(self.weight.detach().clone(), requires_grad=False)

    def acting(self) -> Tensor | None:
        """The rows (K, D) that act now; None: the matrix's own."""
        return self.weight if self.switch.on else self.start

    def looked_up(self, token_ids: Tensor, found: Tensor, look_up: LookUp) -> Tensor:
        """The matrix's rows `found` (..., D) of tokens (...), with ours where we have some."""
        rows = self.acting()
        if rows is None:
            return found
        places = torch.searchsorted(self.token_ids, token_ids).clamp_(max=len(rows) - 1)
        is_ours = self.token_ids[places] == token_ids
        return torch.where(is_ours[..., None], look_up(places, rows).to(found.dtype), found)

    def multiplied(self, x: Tensor, logits: Tensor, multiply: Multiply) -> Tensor:
        """The matrix's logits (..., V) of states x (..., D), with those of our rows in place."""
        rows = self.acting()
        if rows is None:
            return logits
        ours = multiply(x, rows.to(x.dtype))
        return logits.index_copy(-1, self.token_ids, ours)

    @torch.no_grad()
    def merged(self, matrix: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A new matrix (V, D) with the rows that act in it, split as `matrix` is.

        Args:
            dtype: of the result; None: the matrix's.
        """
        made = matrix.detach().to(dtype or matrix.dtype, copy=True)
        rows = self.acting()
        if rows is None:
            return made
        own = rows.full_tensor() if isinstance(rows, DTensor) else rows
        piece, first = made, 0
        if isinstance(made, DTensor):  # pieces are torch.chunk's
            mesh, axis = made.device_mesh, len(made.placements) - 1
            piece = made.to_local()
            first = mesh.get_local_rank(axis) * -(-made.shape[0] // mesh.size(axis))
        is_here = (self.token_ids >= first) & (self.token_ids < first + len(piece))
        piece[self.token_ids[is_here] - first] = own[is_here].to(piece)
        return made
