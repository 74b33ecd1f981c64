"""Supervised fine-tuning (arXiv 2203.02155): the token mean of the cross-entropy on given solutions."""

from hybridflow.flows import nodes

STEP = nodes.offline("solutions", "response_mask") >> nodes.update("response_mask")
