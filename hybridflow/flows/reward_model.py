"""A reward model from pairs (Bradley and Terry, Biometrika 1952; arXiv 1909.08593), with margins (arXiv 2307.09288)."""

from hybridflow.flows import nodes

STEP = nodes.offline("pairs", "margins") >> nodes.update("margins")
