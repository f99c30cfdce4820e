"""A tool server that all rollouts share, with a state for each: a shopping cart."""

import verifiers.v1 as vf


class CartState(vf.State):
    """What one rollout has in its cart."""

    items: tuple[str, ...] = ()


class CartToolset(vf.Toolset[vf.SharedToolsetConfig, CartState]):
    """The tool ``cart_add``."""

    TOOL_PREFIX = "cart"

    @vf.tool
    def add(self, item: str) -> str:
        """Put an item into the cart."""
        self.state.items = (*self.state.items, item)
        return f"{len(self.state.items)} in the cart"


if __name__ == "__main__":
    CartToolset.run()
