"""Repairs KV-cache offloading and capacity numbers of the vLLM that is installed.

vLLM loads :func:`vllm_kvfix.plugin.register` by itself, through the entry point ``kvfix``
in the group ``vllm.general_plugins``. This module imports neither vLLM nor torch.
"""

__version__ = "0.1.0"
