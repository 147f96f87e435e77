"""How the project declares a pytree."""

import dataclasses

import jax


def pytree(cls):
    """A frozen, keyword-only dataclass that is a pytree, every field a child.

    Without `__eq__`: comparing arrays field by field has no one meaning, and objects compare and
    hash by identity.
    """
    return jax.tree_util.register_dataclass(
        dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    )
