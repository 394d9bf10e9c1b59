"""How often norms run: never, more often than once, one for several places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from normkit.surgery.auditing.finding import Finding
from normkit.surgery.auditing.norm import Inspection, Norm


def never_called(seen: Inspection) -> Iterator[Finding]:
    """Norms that the forward leaves out, told apart by what stands beside them."""
    if seen.flow is None or seen.flow.error is not None:
        return  # what a forward that stopped did not reach proves nothing
    by_role: dict[str, list[Norm]] = defaultdict(list)
    for norm in seen.norms:
        by_role[norm.role].append(norm)
    unreached: list[str] = []
    read = seen.flow.reads()
    for norm in (n for n in seen.norms if n.calls == 0 and not read & set(n.parameters)):
        twin = _overused_twin(seen, norm)
        others = [n.name for n in by_role[norm.role] if n.calls]
        if twin is not None:
            yield Finding(
                "danger", "never-called", (norm.name, twin.name),
                f"never ran, while {twin.name.rpartition('.')[2]} beside it ran more than once",
                "one norm does the work of two: its weights are trained for the wrong place, this one's not at all",
                f"call {norm.name.rpartition('.')[2]} where the second call of {twin.name.rpartition('.')[2]} stands",
            )  # fmt: skip
        elif others and not _idle_beside(seen, norm, read):
            yield Finding(
                "danger", "never-called", (norm.name,),
                f"never ran, while {len(others)} of its kind in other layers did",
                "this layer's stream is not normalised as its neighbours' is; the weights are loaded and ignored",
                "call it in this layer's forward as the other layers do",
            )  # fmt: skip
        elif seen.was_called(norm.name.rpartition(".")[0]):
            yield Finding(
                "warning", "never-called", (norm.name,), "never ran, although the module around it did",
                "its weights take memory and, in a distributed run, wait for a gradient that never comes",
                "call it, or delete it; if another input reaches it, audit the model with that input",
            )  # fmt: skip
        else:
            unreached.append(norm.name)
    if unreached:
        yield Finding(
            "info", "not-reached", tuple(unreached), "never ran: this input does not reach the modules around them",
            "nothing is said here about how they are wired",
            "audit the model with an input that reaches them",
        )  # fmt: skip


def _idle_beside(seen: Inspection, norm: Norm, read: set[str]) -> bool:
    """Return whether a layer beside this norm idles too: then a whole path is switched off here, not a norm."""
    parent = norm.name.rpartition(".")[0]
    for name, module in seen.modules.items():
        beside = name.rpartition(".")[0] == parent and not any(n.name == name for n in seen.norms)
        own = {f"{name}.{p}" for p, _ in module.named_parameters()} if beside else set[str]()
        if own and not seen.was_called(name) and not own & read:
            return True
    return False


def _overused_twin(seen: Inspection, norm: Norm) -> Norm | None:
    """Return a norm of the same parent that runs more than once a call, could stand here, and does."""
    parent = norm.name.rpartition(".")[0]
    for other in seen.norms:
        same = other.name.rpartition(".")[0] == parent and other.class_name == norm.class_name
        fits = other.weight_shape == norm.weight_shape and not other.function
        if same and fits and (other.calls or 0) > seen.parent_calls(other.name):
            return other
    return None


def called_more_than_once(seen: Inspection) -> Iterator[Finding]:
    """Norms that run several times in one call of the module around them."""
    if seen.flow is None:
        return
    for norm in seen.norms:
        if norm.function or not norm.calls or norm.calls <= seen.parent_calls(norm.name):
            continue
        places = ", ".join(norm.positions)
        weighted = bool(norm.parameters) and len(norm.positions) > 1
        yield Finding(
            "warning" if weighted else "info", "called-more-than-once", (norm.name,),
            f"runs {norm.calls} times in one forward ({places})",
            "one weight serves places with different scales" if weighted else "the same norm, several times",
            "give each place a norm of its own, unless it is shared on purpose" if weighted else "nothing",
        )  # fmt: skip


def shared(seen: Inspection) -> Iterator[Finding]:
    """Norm modules with several names, and parameters that several norms hold."""
    for norm in seen.norms:
        if norm.aliases:
            yield Finding(
                "info", "shared-module", (norm.name, *norm.aliases), "one module under several names",
                "a change to one is a change to all; a checkpoint may hold its weights several times",
                "nothing, if it is meant",
            )  # fmt: skip
    owners: dict[int, list[str]] = defaultdict(list)
    parameters = {p for norm in seen.norms for p in norm.parameters}
    modules: dict[str, int] = {name: id(module) for name, module in seen.modules.items()}
    for name, tensor in seen.parameters.items():
        if name in parameters or any(name.rpartition(".")[0] == n.name for n in seen.norms):
            owners[id(tensor)].append(name)
    for names in owners.values():
        if len({modules.get(name.rpartition(".")[0]) for name in names}) > 1:
            yield Finding(
                "info", "tied-weights", tuple(names), "one parameter, held by several norms",
                "training one trains all", "nothing, if it is meant",
            )  # fmt: skip
