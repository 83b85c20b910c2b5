"""Serving: a model's versions answer requests over HTTP. `syncline serve`, or `Server` in Python.

datatypes, protocol            arrays and the Open Inference Protocol; what a request may be
model, torch_model, devices    the operator's file: a torch module, or an object on NumPy arrays; where it computes
reading, loading, versions     where versions come from; how they are tried; which one answers
following                      versions from a job that trains: one cut of its servers after another
batch_policy, batching         when requests become a batch (pure); the thread that calls the model
limits, metrics                tokens, rates, connections; what is counted
application, listening, tls    HTTP: routes; uvicorn around them; the same over TLS
openapi, page_files, static/   the description of that API; the page that tries the model in a browser
grpc_calls                     the same over gRPC
settings, answering            how a model is served; batches, HTTP and gRPC together, in one process
shared_weights, replicas/      weights in memory that processes share; several processes behind one port
control, standing, server      `serve-ctl`; all of it together
offline                        a model without a server
exporting                      a torch module with saved weights as ONNX or torch.export (`syncline export`)
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from syncline.serve.offline import load_model
    from syncline.serve.server import InferenceServer as Server
    from syncline.serve.server import ServeConfig

__all__ = ["ServeConfig", "Server", "load_model"]


def __getattr__(name: str) -> typing.Any:
    """Loaded when it is used: `syncline serve-ctl` needs no web server."""
    if name == "load_model":
        from syncline.serve.offline import load_model

        return load_model
    if name in __all__:
        from syncline.serve import server

        return server.InferenceServer if name == "Server" else server.ServeConfig
    raise AttributeError(f"module 'syncline.serve' has no attribute {name!r}")
