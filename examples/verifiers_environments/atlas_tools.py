"""A tool server that is started for each rollout: capitals of countries."""

import verifiers.v1 as vf

CAPITALS = {"France": "Paris", "Kenya": "Nairobi", "Chile": "Santiago"}


class AtlasToolset(vf.Toolset[vf.ToolsetConfig]):
    """The tool ``atlas_capital``."""

    TOOL_PREFIX = "atlas"

    @vf.tool
    def capital(self, country: str) -> str:
        """Look up the capital of a country."""
        return CAPITALS.get(country, f"no country {country}")


if __name__ == "__main__":
    AtlasToolset.run()
