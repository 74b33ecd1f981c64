"""Other engines behind the interface of ours: vLLM in this process, and servers over HTTP."""
