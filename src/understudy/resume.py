"""resume: continue the user's own forward from a site, under other gates, for many rows at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from understudy import divergence, head
from understudy.anatomy import Anatomy, Layer
from understudy.capture import Capture, Stop
from understudy.gates import spread
from understudy.outcome import Reads
from understudy.rows import expand, segments
from understudy.site import linear_map
from understudy.surgery import answering, hooked, replaced

# (intervened logits, dense logits, dense probabilities), each [..., classes] -> a number, or several, for each
# distribution: [...] or [..., numbers].
Reducer = Callable[[Tensor, Tensor, Tensor], Tensor]

BUDGET = 2**30  # bytes above the model's own
_SCATTERED = 2**16  # numbers of an input's logits below which a pass of its own costs more than a copy
CACHED = 2**20  # numbers of one activation that a CPU works on at its best: more leave its cache, fewer leave it idle


def kl_to_dense(logits: Tensor, dense: Tensor, p: Tensor) -> Tensor:
    """The reducer of CFS: D = KL(dense ‖ intervened)."""
    return divergence.kl(dense, p, logits)


def kl_and_bend(logits: Tensor, dense: Tensor, p: Tensor) -> Tensor:
    """D, and the Fisher norm of the change."""
    return divergence.kl_and_bend(dense, p, logits)


class Suffix:
    """A captured batch, opened at one site.

    A row is an input under a vector of gates. Rows are given with `owner`, the index of their input in the batch,
    sorted. The layers before the site, the embeddings and the site's own attention never run again; after the last
    attention only the tokens that the outcome reads are computed.

    Inside, a *cell* is what one matrix product mixes: the tokens that one distribution reads when the site is in the
    last block, else all tokens of an input.
    """

    def __init__(
        self, body: Anatomy, taken: Capture, layer: int, reads: Reads, *, dtype: torch.dtype, budget: int = BUDGET
    ) -> None:
        self.body, self.taken, self.reads, self.dtype, self.budget = body, taken, reads, dtype, budget
        self.layer = body.sites[layer]
        self.last = body.layers[-1]
        self.at_end = self.layer.index == self.last.index
        self.evaluations = torch.zeros(taken.count, dtype=torch.int64)  # rows run, for each input
        state = taken.sites[layer]
        self._cells = reads.counts if self.at_end else (1,) * taken.count

        def cells(value: Tensor) -> Tensor:
            return (reads.gather(value) if self.at_end else value).to(dtype)

        self.residual, self.inner = cells(state.residual), cells(state.inner)  # [cells, tokens, ...]
        self.beside = None if state.beside is None else cells(state.beside)
        native = state.out.dtype == dtype
        self.out = cells(state.out) if native else self.layer.site(self.inner)
        self.weight, self.bias = linear_map(self.layer, self.inner)
        self._contributions = self._precomputed()
        self.final = reads.gather(taken.final) if native else self._dense()  # [distributions, n, width]
        self.classes = int(self._logits(self.final[:1]).shape[-1])
        self._known: tuple[Tensor, Tensor] | None = None

    # The public operation.

    def resume(
        self,
        gates: Tensor,
        owner: Tensor,
        *,
        later: Mapping[int, Tensor] | None = None,
        reduce: Reducer = kl_to_dense,
        anew: bool = False,
        advance: Callable[[int], None] | None = None,
    ) -> Tensor:
        """The reducer's number for each row, the mean over its distributions: float64 `[rows]` or `[rows, numbers]`.

        gates: `[rows, units]` at the site. later: gates at later layers, `[rows, units]` each.
        """
        owner = owner.cpu()
        gates = gates.to(self.residual.device, self.dtype)
        parts = []
        for start in range(0, len(gates), step := self._rows_at_once()):
            rows = slice(start, start + step)
            ahead = {index: value[rows].to(gates) for index, value in (later or {}).items()}
            hidden = self.states(gates[rows], owner[rows], ahead, anew=anew)
            parts.append(self._reduce(hidden, owner[rows], reduce))
            if advance is not None:
                advance(len(owner[rows]))
        self.evaluations += owner.bincount(minlength=self.taken.count)
        return torch.cat(parts)

    def noise(self) -> Tensor:
        """KL(dense ‖ resumed with all gates at one) for each input: what says nothing.

        The site's output is put together anew from its parts, and each input runs twice, so that sums are taken in
        another order and the batch has another shape than on the dense forward.
        """
        owner = torch.arange(self.taken.count).repeat_interleave(2)
        return self.resume(torch.ones(len(owner), self.layer.units), owner, anew=True).view(-1, 2).amax(-1)

    def slopes(
        self, gates: Tensor, owner: Tensor, *, reduce: Reducer = kl_to_dense, towards: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What `resume` gives for each row, and ∂D/∂g of every unit, float64 `[rows, units]`, in one pass.

        towards: a class for each distribution of the batch; then it is the slope of the cross-entropy with these.

        The head's backward runs in slices of distributions down to the final hidden states, with the gradient of the
        divergence known in closed form, `∂D/∂logits = softmax(logits) − p`; then one backward through the blocks, for
        the site's output only, whose product with the contributions is the slope.
        """
        owner = owner.cpu()
        gates = gates.to(self.residual.device, self.dtype)
        # A backward keeps the activations of every block that is left.
        step = self._rows_at_once(kept=2 * (len(self.body.layers) - self.layer.index))
        found, parts = [], []
        for start in range(0, len(gates), step):
            rows = slice(start, start + step)
            row, cell = expand(owner[rows], self._cells)
            output = self._mix(self.out, gates[rows] - 1, owner[rows], row, cell)
            with torch.enable_grad():
                hidden = self._onward(output.requires_grad_(), owner[rows], cell, {})
            pull = torch.empty_like(hidden)
            found.append(self._reduce(hidden.detach(), owner[rows], reduce, pull, towards))
            (gradient,) = torch.autograd.grad(hidden, output, pull)
            parts.append(self._along_units(gradient, owner[rows], row, cell))
        self.evaluations += owner.bincount(minlength=self.taken.count)
        return torch.cat(found), torch.cat(parts)

    def states(self, gates: Tensor, owner: Tensor, later: Mapping[int, Tensor], *, anew: bool = False) -> Tensor:
        """The final hidden states of the rows at the tokens read: `[rows' distributions, n, width]`.

        The site's output is dense + Σ (g − 1) c, exactly dense where all gates are one; `anew`, it is bias + Σ g c.
        """
        row, cell = expand(owner, self._cells)
        base, change = (self.bias.expand_as(self.out), gates) if anew else (self.out, gates - 1)
        return self._onward(self._mix(base, change, owner, row, cell), owner, cell, later)

    def _onward(self, output: Tensor, owner: Tensor, cell: Tensor, later: Mapping[int, Tensor]) -> Tensor:
        """From the site's output to the final hidden states at the tokens read."""
        beside = None if self.beside is None else self.beside[cell]
        hidden = self._block(self.layer, self.residual[cell], output, beside)
        if self.at_end:
            return hidden
        inputs = owner.to(hidden.device)
        for layer in self.body.layers[self.layer.index + 1 : -1]:
            args, kwargs = self._call(layer, inputs)
            with hooked(_gating(self.body.sites[layer.index], later)):
                hidden = layer.block(hidden, *args, **kwargs)
        return self._last_block(hidden, owner, later)

    # The site's own block, and the last one.

    def _mix(self, base: Tensor, change: Tensor, owner: Tensor, row: Tensor, cell: Tensor) -> Tensor:
        """Σ change c over the units of each row, on top of `base`."""
        if self._contributions is None:
            inner = self.inner[cell] * spread(change, self.layer)[row][:, None]  # [rows' cells, tokens, units * width]
            return base[cell] + inner @ self.weight
        mixed = self.out.new_empty(len(row), *self.out.shape[1:])
        flat = base.reshape(1, -1)
        for rows, here, these in self._placed(owner):
            torch.addmm(
                flat[:, these],
                change[rows.start : rows.stop],
                self._contributions[:, these],
                out=mixed[here].view(len(rows), -1),
            )
        return mixed

    def _along_units(self, gradient: Tensor, owner: Tensor, row: Tensor, cell: Tensor) -> Tensor:
        """The inner product of each row's gradient with each unit's contribution: float64 `[rows, units]`."""
        units = self.layer.units
        along = gradient.new_zeros(len(owner), units, dtype=torch.float64)
        if self._contributions is None:
            pulled = (gradient @ self.weight.T) * self.inner[cell]  # [rows' cells, tokens, units * width]
            sums = pulled.view(*pulled.shape[:2], units, -1).sum((1, 3), dtype=torch.float64)
            return along.index_add_(0, row.to(along.device), sums)
        for rows, here, these in self._placed(owner):
            flat = gradient[here].reshape(len(rows), -1)
            along[rows.start : rows.stop] = (flat @ self._contributions[:, these].T).double()
        return along

    def _placed(self, owner: Tensor) -> Iterator[tuple[range, slice, slice]]:
        """For each input: its rows, their cells, and the columns of its contributions."""
        at, size = 0, self.out[0].numel()
        first = torch.tensor((0, *self._cells)).cumsum(0).tolist()
        for index, rows in segments(owner):
            stop = at + len(rows) * self._cells[index]
            yield rows, slice(at, stop), slice(first[index] * size, first[index + 1] * size)
            at = stop

    def _block(self, layer: Layer, residual: Tensor, projected: Tensor, beside: Tensor | None = None) -> Tensor:
        """A block's own forward from a given output of its site; its attention does not run."""

        def attention(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else kwargs["hidden_states"]
            output = layer.close(layer.attention, given, projected) if inside else given
            return (output, None) if layer.pair else output

        inside = any(module is layer.site for module in layer.attention.modules())
        changes: list[tuple[object, str, Any]] = [(layer.attention, "forward", attention)]
        if not inside:
            changes += answering(layer.site, lambda *_: projected)
        if layer.beside is not None and beside is not None:
            changes += answering(layer.beside, lambda *_, **__: (beside, None) if layer.beside_pair else beside)
        args, kwargs = self._call(layer, None)
        with replaced(changes):
            hidden: Tensor = layer.block(residual, *args, **kwargs)
        return hidden

    def _last_block(self, hidden: Tensor, owner: Tensor, later: Mapping[int, Tensor]) -> Tensor:
        """The last block: its attention for all tokens, everything after it for the tokens that are read."""
        inner = self._until_site(self.last, hidden, owner)
        row, distribution = expand(owner, self.reads.counts)
        row, tokens = row.to(hidden.device), self.reads.tokens[distribution.to(hidden.device)]
        inner = inner[row[:, None], tokens]  # [rows' distributions, n, units * width]
        if self.last.index in later:
            inner = inner * spread(later[self.last.index], self.body.sites[-1])[row][:, None]
        return self._block(self.last, hidden[row[:, None], tokens], self.last.site(inner))

    def _until_site(self, layer: Layer, hidden: Tensor, owner: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def grab(_site: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.append(args[0])
            raise Stop

        args, kwargs = self._call(layer, owner.to(hidden.device))
        with hooked([layer.site.register_forward_pre_hook(grab, prepend=True)]), suppress(Stop):
            layer.block(hidden, *args, **kwargs)
        return seen[0]

    def _call(self, layer: Layer, owner: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Without an owner the attention is not run, and nothing else in a block reads these.
        args, kwargs = self.taken.calls[layer.index]
        if owner is None:
            return args, kwargs
        args, kwargs = self.taken.rows(args, owner), {key: self.taken.rows(v, owner) for key, v in kwargs.items()}
        return _cast(args, self.dtype), _cast(kwargs, self.dtype)

    # From final hidden states to numbers.

    def predictions(self) -> Tensor:
        """The class that the dense model prefers, for each distribution of the batch."""
        step = self._at_once()
        starts = range(0, len(self.final), step)
        return torch.cat([self._logits(self.final[start : start + step]).argmax(-1) for start in starts])

    def _reduce(
        self,
        hidden: Tensor,
        owner: Tensor,
        reduce: Reducer,
        pull: Tensor | None = None,
        towards: Tensor | None = None,
    ) -> Tensor:
        """The reducer's mean for each row. Into `pull`, if given, goes ∂D/∂hidden."""
        total: Tensor | None = None
        at_row = at_hidden = 0
        bundles = list(self._bundles(owner))
        if pull is None and len(bundles) > 1 and len(hidden) * self.classes < _SCATTERED * len(bundles):
            return self._reduce_scattered(hidden, owner, reduce)
        for first, inputs, rows, each in bundles:
            size = inputs * rows * each
            shape = (inputs, rows, each, *hidden.shape[1:])
            states = hidden[at_hidden : at_hidden + size].view(shape)
            tall, wide = self._slice(inputs, rows, each)
            for g in range(0, each, wide):
                dense, p = (value.unsqueeze(1) for value in self._reference(first, inputs, each, g, g + wide))
                for r in range(0, rows, tall):
                    part = states[:, r : r + tall, g : g + wide]
                    flat = part.reshape(-1, *part.shape[3:])
                    if pull is None:
                        logits = self._logits(flat).view(*part.shape[:3], -1)
                    else:
                        pulled = pull[at_hidden : at_hidden + size].view(shape)[:, r : r + tall, g : g + wide]
                        aim = p if towards is None else self._certain(towards, first, inputs, each, g, g + wide)
                        logits = self._pull(flat, aim, pulled).view(*part.shape[:3], -1)
                        pulled /= each
                    value = reduce(logits, dense, p).sum(2) / each  # [inputs, rows] or [inputs, rows, numbers]
                    if total is None:
                        total = value.new_zeros(len(owner), *value.shape[2:])
                    here = total[at_row : at_row + inputs * rows].view(inputs, rows, *value.shape[2:])
                    here[:, r : r + tall] += value
            at_row, at_hidden = at_row + inputs * rows, at_hidden + size
        return torch.zeros(0) if total is None else total

    def _reduce_scattered(self, hidden: Tensor, owner: Tensor, reduce: Reducer) -> Tensor:
        """The same for inputs with few numbers and each its own number of rows: all through the head together."""
        row, distribution = (index.to(hidden.device) for index in expand(owner, self.reads.counts))
        parts = []
        for start in range(0, len(hidden), step := self._at_once()):
            span = slice(start, start + step)
            which, place = distribution[span].unique(return_inverse=True)  # type: ignore[no-untyped-call]
            dense = self._logits(self.final[which])
            p = divergence.probabilities(dense)
            parts.append(reduce(self._logits(hidden[span]), dense[place], p[place]))
        found = torch.cat(parts)
        total = found.new_zeros(len(owner), *found.shape[1:]).index_add_(0, row, found)
        each = torch.tensor(self.reads.counts, device=found.device)[owner.to(found.device)]
        return total / each.view(-1, *[1] * (found.ndim - 1))

    def _pull(self, states: Tensor, p: Tensor, pulled: Tensor) -> Tensor:
        """The logits; into `pulled` goes ∂KL/∂states, the head's backward of softmax(logits) − p."""
        with torch.enable_grad():
            leaf = states.detach().requires_grad_()
            logits = self._logits(leaf)
        wide = torch.promote_types(logits.dtype, torch.float32)  # in half precision the difference would be rounding
        change = torch.softmax(logits.detach(), -1, dtype=wide).view(*pulled.shape[:3], -1).sub_(p)
        (gradient,) = torch.autograd.grad(logits, leaf, change.view(logits.shape).to(logits.dtype))
        pulled.copy_(gradient.view(pulled.shape))
        return logits.detach()

    def _bundles(self, owner: Tensor) -> Iterator[tuple[int, int, int, int]]:
        """Runs of neighbouring inputs with equally many rows and distributions, small enough for one pass."""
        limit = self._at_once()
        shapes = [(index, len(rows), self.reads.counts[index]) for index, rows in segments(owner)]
        for (rows, each), run in groupby(shapes, key=lambda shape: shape[1:]):
            indices = [shape[0] for shape in run]
            step = max(1, limit // (rows * each))
            for start in range(0, len(indices), step):
                part = indices[start : start + step]
                if part[-1] - part[0] + 1 == len(part):
                    yield part[0], len(part), rows, each
                else:  # an input between them has no rows at all
                    yield from ((index, 1, rows, each) for index in part)

    def _reference(self, first: int, inputs: int, each: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Dense logits and probabilities of distributions [start, stop) of these inputs, `[inputs, ..., classes]`."""
        begin = sum(self.reads.counts[:first])
        size = 2 * len(self.final) * self.classes * self.out.element_size()
        if self._known is None and size <= self.budget // 8:
            dense = self._logits(self.final)
            self._known = dense, divergence.probabilities(dense)
        if self._known is not None:
            known = (value[begin : begin + inputs * each] for value in self._known)
            dense, p = (value.view(inputs, each, -1)[:, start:stop] for value in known)
            return dense, p
        # Large vocabularies: again for each slice, never kept for all inputs.
        states = self.final[begin : begin + inputs * each].view(inputs, each, *self.final.shape[1:])[:, start:stop]
        dense = self._logits(states.reshape(-1, *self.final.shape[1:])).view(*states.shape[:2], -1)
        return dense, divergence.probabilities(dense)

    def _certain(self, towards: Tensor, first: int, inputs: int, each: int, start: int, stop: int) -> Tensor:
        """All of the probability on one class, shaped as `_reference` shapes that of the dense model."""
        begin = sum(self.reads.counts[:first])
        chosen = towards[begin : begin + inputs * each].view(inputs, each)[:, start:stop]
        return nn.functional.one_hot(chosen, self.classes).to(self.dtype).unsqueeze(1)

    def _logits(self, hidden: Tensor) -> Tensor:
        """`[distributions, n, width] -> [distributions, classes]`."""
        answer = head.logits(self.body, hidden)
        return answer if answer.ndim == 2 else answer[:, 0]

    def _dense(self) -> Tensor:
        owner = torch.arange(self.taken.count)
        ones = torch.ones(self.taken.count, self.layer.units, dtype=self.dtype, device=self.residual.device)
        step = self._rows_at_once()
        spans = [slice(start, start + step) for start in range(0, len(owner), step)]
        return torch.cat([self.states(ones[span], owner[span], {}) for span in spans])

    # Sizes, from the memory budget.

    def _precomputed(self) -> Tensor | None:
        """Every unit's contribution, `[units, cells * tokens * width]`, where that fits an eighth of the budget."""
        units, width = self.layer.units, self.layer.width
        if self.out.numel() * units * self.out.element_size() > self.budget // 8:
            return None
        inner = self.inner.view(*self.inner.shape[:2], units, width)
        weight = self.weight.view(units, width, -1)
        return torch.einsum("ctuw,uwd->uctd", inner, weight).reshape(units, -1)

    def _rows_at_once(self, *, kept: int = 1) -> int:
        """How many rows run together, if the activations of so many blocks are kept."""
        tokens = max(self._cells) * self.inner.shape[1] if self.at_end else self.taken.tokens
        widest = max(max(p.shape) for p in self.layer.block.parameters())
        floats = tokens * (8 * self.out.shape[-1] + 4 * widest)
        config = getattr(self.body.base, "config", None)
        if not self.at_end and getattr(config, "_attn_implementation", "sdpa") == "eager":
            floats += 3 * self.layer.units * tokens**2
        rows = self.budget // 4 // (kept * floats * self.out.element_size())
        if self.out.device.type == "cpu":
            rows = min(rows, CACHED // (tokens * self.out.shape[-1]))
        return max(1, rows)

    def _at_once(self) -> int:
        """How many distributions go through the head together."""
        return max(1, self.budget // 4 // (3 * self.classes * self.out.element_size()))

    def _slice(self, inputs: int, rows: int, each: int) -> tuple[int, int]:
        """Rows and distributions of a bundle in one slice; many rows, since they share the dense logits."""
        limit = self._at_once()
        tall = min(rows, limit)
        return tall, each if inputs > 1 else min(each, max(1, limit // tall))


def _gating(layer: Layer, later: Mapping[int, Tensor]) -> list[Any]:
    if layer.index not in later:
        return []
    factor = spread(later[layer.index], layer)[:, None]  # [rows, 1, units * width]
    return [layer.site.register_forward_pre_hook(lambda _site, args: (args[0] * factor, *args[1:]))]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        limit = torch.finfo(dtype)  # the least number of a wider type, as masks hold it, would become -inf
        return value if value.dtype == dtype else value.to(dtype).clamp(limit.min, limit.max)
    if isinstance(value, tuple | list):
        return type(value)(_cast(item, dtype) for item in value)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value
