"""What a measurement costs, before it is made: evaluations, floating-point work, numbers touched, seconds, bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import nn

from understudy.anatomy import Anatomy
from understudy.search import Search

NOISE_ROWS = 2  # evaluations for each input and layer that only tell the noise
_OPERATIONS_A_NUMBER = 200
_KL_PASSES = 6  # steps over every logit, from logits to a divergence


@dataclass(frozen=True)
class Work:
    """Floating-point operations of matrix products, and numbers that the other steps write."""

    flops: float
    touched: float

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.touched + other.touched)

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.touched * times)

    __rmul__ = __mul__


@dataclass(frozen=True)
class Rates:
    """How fast a machine does each kind of work, for each second."""

    flops: float
    touched: float

    def seconds(self, work: Work) -> float:
        """The time of the work: `flops / rate + touched / rate`."""
        return work.flops / self.flops + work.touched / self.touched

    @classmethod
    def given(cls, flops: float) -> Rates:
        """The rates of a machine of which only the rate of products is known: each number costs like 200 operations.

        That is about what CPUs and accelerators have in common: their memory is that much slower.
        """
        return cls(flops, flops / _OPERATIONS_A_NUMBER)

    @classmethod
    def measured(cls, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> Rates:
        """What this machine reaches: a product of matrices the size of a block's, and an activation function."""
        rows, width, inner = 1024, 768, 3072
        a, b = (
            torch.randn(rows, width, device=device, dtype=dtype),
            torch.randn(width, inner, device=device, dtype=dtype),
        )
        product = a @ b
        multiply = _median_seconds(lambda: torch.mm(a, b, out=product), device)
        activate = _median_seconds(lambda: nn.functional.gelu(product), device)
        return cls(2 * rows * width * inner / multiply, product.numel() / activate)


@dataclass(frozen=True)
class Shape:
    """What the cost depends on: numbers of a model, and of one of its inputs.

    >>> small = Shape(layers=12, units=12, width=768, inner=768, before=3 * 768**2, site=768**2, after=8 * 768**2,
    ...               head=768 * 50257, classes=50257, tokens=128, distributions=128, read=128)
    >>> round(small.row(6).flops / 1e9, 1)  # one intervention in the middle of GPT-2
    20.4

    before, site, after: weights of the linear maps of a block, up to its site, of the site, and behind it; head: of
    the maps behind the blocks. inner: the width of the site's input. read: tokens that the outcome reads. parallel:
    whether what is behind the site reads the block's input beside the attention, and so is not run again.
    """

    layers: int
    units: int
    width: int
    inner: int
    before: int
    site: int
    after: int
    head: int
    classes: int
    tokens: int
    distributions: int
    read: int
    parallel: bool = False

    @classmethod
    def of(cls, body: Anatomy, *, tokens: int, distributions: int, read: int, classes: int) -> Shape:
        """The shape of a model on an input with so many tokens."""
        layer = body.layers[-1]
        site = _weights(layer.site.parameters())
        width = max(1, site // (layer.units * layer.width))
        inside = set(layer.attention.parameters()) - set(layer.site.parameters())
        blocks = {p for x in body.layers for p in x.block.parameters()}
        # An embedding is no product, unless the head uses it as one.
        starts = [attrgetter(path)(body.base) for path in body.family.embeddings]
        embedded = {p for start in starts if isinstance(start, nn.Module) for p in start.parameters()}
        output = getattr(body.model, "get_output_embeddings", lambda: None)()
        weight = getattr(output, "weight", None)
        tied = {weight} if isinstance(weight, nn.Parameter) else set()
        outside = set(body.model.parameters()) - blocks
        head = _weights((outside - embedded) | tied)
        before = _weights(inside)
        return cls(
            layers=len(body.layers),
            units=body.sites[-1].units,
            width=width,
            inner=layer.units * layer.width,
            before=before,
            site=site,
            after=_weights(layer.block.parameters()) - before - site,
            head=head,
            classes=classes,
            tokens=tokens,
            distributions=distributions,
            read=read,
            parallel=body.sites[-1].beside is not None,
        )

    def row(self, layer: int) -> Work:
        """One evaluation: from the site of a layer to the divergence."""
        last = self.layers - 1
        own = self.read if layer == last else self.tokens
        mixed = Work(2 * self.units * self.width * own, self.width * own)
        work = mixed + self._head()
        if not self.parallel:
            work += self._behind(own)
        if layer < last:
            work += (last - 1 - layer) * (self._attention(self.tokens) + self._behind(self.tokens))
            work += self._attention(self.read) + self._behind(self.read)
        return work

    def dense(self) -> Work:
        """The capture of one input."""
        return self.layers * (self._attention(self.tokens) + self._behind(self.tokens)) + self._head()

    def _attention(self, projected: int) -> Work:
        scores = self.tokens**2
        flops = 2 * self.before * self.tokens + 4 * scores * self.inner + 2 * self.site * projected
        touched = (self.before // self.width + 2 * self.width + self.inner) * self.tokens + self.units * scores
        return Work(flops, touched + 2 * self.width * projected)

    def _behind(self, tokens: int) -> Work:
        return Work(2 * self.after * tokens, (2 * self.after // self.width + 4 * self.width) * tokens)

    def _head(self) -> Work:
        return Work(2 * self.head * self.distributions, _KL_PASSES * self.classes * self.distributions)


@dataclass(frozen=True)
class Cost:
    """What a measurement takes: downstream evaluations, their work, and bytes of the result."""

    evaluations: float
    work: Work
    stored: int


def cost(shape: Shape, *, inputs: int, layers: Sequence[int], search: Search) -> Cost:
    """The law: for each input one capture; for each layer the noise, the sources, and the pairs of the search.

    `evaluations = inputs · layers · (2 + H + H (H − 1) · e)`, with e what the search takes for each pair. A search
    that starts from slopes adds a backward to each source: as much work again, for the states but not the weights.
    """
    pairs = shape.units * (shape.units - 1)
    each = NOISE_ROWS + shape.units + pairs * search.expected(shape.units)
    backward = shape.units if search.sloped else 0
    work = Work(0, 0)
    for layer in layers:
        work += (each + backward) * shape.row(layer)
    return Cost(
        evaluations=inputs * len(layers) * each,
        work=inputs * (shape.dense() + work),
        stored=inputs * (len(layers) * 4 * (3 * shape.units**2 + shape.units + 3) + 12),
    )


def fitted(works: Sequence[Work], seconds: Sequence[float]) -> Rates:
    """The rates that explain measured times best, in proportion: non-negative least squares."""
    import numpy as np
    from scipy.optimize import nnls

    table = np.array([[work.flops / t, work.touched / t] for work, t in zip(works, seconds, strict=True)])
    scale = table.max(axis=0)
    found, _ = nnls(table / scale, np.ones(len(table)))
    return Rates(*(float(s / max(x, 1e-12)) for x, s in zip(found, scale, strict=True)))


def _weights(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if p.ndim == 2)


def _median_seconds(call: Callable[[], object], device: str | torch.device, repeats: int = 9) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
