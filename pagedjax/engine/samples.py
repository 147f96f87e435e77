"""Putting the samples of one request together: one delta a step, or the best of them at the end."""

from collections.abc import Iterable, Mapping

from pagedjax.engine.request import Request
from pagedjax.outputs import CompletionOutput, RequestOutput


class Gatherer:
    """Joins the deltas of requests for several outputs. Driven by the engine's thread."""

    def __init__(self) -> None:
        self._whole: dict[int, RequestOutput] = {}  # id(leader) -> what is held until the end

    def gather(self, deltas: Iterable[tuple[Request, RequestOutput]]) -> list[RequestOutput]:
        """The deltas of one step -> at most one for each request, in the order of their first one.

        Of a request whose best outputs are wanted only, nothing is told before it has ended.
        """
        joined: dict[int, tuple[Request, RequestOutput]] = {}
        for sample, delta in deltas:
            leader = sample.leader
            if id(leader) in joined:
                joined[id(leader)][1].add(delta)
            else:
                joined[id(leader)] = leader, delta
        told = (self._hold(*pair) for pair in joined.values())
        return [delta for delta in told if delta is not None]

    def held(self, leader: Request) -> RequestOutput | None:
        """What is held of a request until its end, if anything."""
        return self._whole.get(id(leader))

    def restore(self, held: Mapping[Request, RequestOutput]) -> None:
        """Hold what another one held, by leader."""
        self._whole = {id(leader): output for leader, output in held.items()}

    def _hold(self, leader: Request, delta: RequestOutput) -> RequestOutput | None:
        if leader.search is not None or len(leader.samples) == leader.params.n:
            return delta
        whole = self._whole.setdefault(id(leader), delta)
        if whole is not delta:
            whole.add(delta)
        if not delta.finished:
            return None
        del self._whole[id(leader)]
        whole.outputs = best(leader, whole.outputs)
        return whole


def best(leader: Request, outputs: list[CompletionOutput]) -> list[CompletionOutput]:
    """The n outputs with the highest log-probability per token, the best first; of equal ones the
    earlier. Those that failed or were aborted come last."""

    def key(output: CompletionOutput) -> tuple[bool, float]:
        total = leader.samples[output.index].cumulative_logprob
        whole = output.finish_reason in ("stop", "length")
        return whole, total / max(len(output.token_ids), 1)

    chosen = sorted(outputs, key=key, reverse=True)[: leader.params.n]
    for index, output in enumerate(chosen):
        output.index = index
    return chosen
