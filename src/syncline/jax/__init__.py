"""Syncline for JAX: an optax transform that trains with the other workers, and mean gradients of pytrees."""

# Layout, in reading order.
#
# packages        JAX and optax, or an error that says what to install
# trees           leaves of a pytree by name, as NumPy arrays and back
# ordered_calls   calls from compiled code, one after the other, with as few copies as JAX allows
# host_calls      calls from compiled code to the job, and errors on their way back
# transform       `distribute`: the optax transform
# on_servers, changes, replicas   its three ways to step: by rule, by changes, by mean gradients
# gradients       `push_pull` and `broadcast`
# serving         `JaxModel`: a function for `syncline serve`

from syncline.jax.gradients import broadcast, push_pull
from syncline.jax.serving import JaxModel
from syncline.jax.transform import distribute

__all__ = ["JaxModel", "broadcast", "distribute", "push_pull"]
