"""Roles of tests: their public methods are their calls."""

from collections.abc import Mapping

from hybridflow.dataflow.role import NodeCall, Role


class MethodRole(Role):
    """A role that lists its own methods as calls."""

    @property
    def calls(self) -> Mapping[str, NodeCall]:
        own = [name for name in dir(self) if not name.startswith("_") and not hasattr(Role, name)]
        return {name: getattr(self, name) for name in own if callable(getattr(self, name))}
