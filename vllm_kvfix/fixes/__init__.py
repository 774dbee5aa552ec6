"""One module a fix, each of the form that :class:`vllm_kvfix._fix.Fix` describes."""
