"""What config.json calls the settings of rotary positions, and back.

They are read in the form of transformers 5 (rope_parameters) and of the released checkpoints (rope_theta,
rope_scaling), and written in the latter, which both understand.
"""

from __future__ import annotations

from typing import Any

from forge.errors import ConfigError, UnreadableError
from forge.model.positions import Rotary, YaRN, louder

Settings = dict[str, Any]


def rotary_fields(settings: Settings) -> Settings:
    """Raises KeyError for what is not stated, UnreadableError for what is not computed."""
    stated: Settings = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    usual = 1e6 if settings["model_type"] == "mixtral" else 1e4
    base = stated.get("rope_theta", settings.get("rope_theta", usual))
    kind = stated.get("rope_type", stated.get("type", "default"))
    scalings = {"default": lambda stated, latent: None, "llama3": _llama3, "yarn": _yarn}
    if kind not in scalings or stated.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnreadableError(f"Rotary positions scaled by {stated} are not computed; known are {', '.join(scalings)}.")
    latent = settings["model_type"] == "deepseek_v3"
    # DeepSeek's own code always interleaves, and states nothing.
    return {"base": base, "interleaved": latent and settings.get("rope_interleave", True),
            "scaling": scalings[kind](stated, latent)}


def rotary_settings(rotary: Rotary | None) -> Settings:
    if rotary is None:
        raise ConfigError("This model.family has no place for learned positions (model.rotary=null).")
    if rotary.scaling is None:
        return {"rope_theta": rotary.base, "rope_scaling": None}
    scaling, common = rotary.scaling, {
        "factor": rotary.scaling.factor, "original_max_position_embeddings": rotary.scaling.original_max_length}
    own = {"rope_type": "yarn", "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow,
           "truncate": scaling.truncate, "attention_factor": scaling.amplitude,
           "mscale_all_dim": scaling.mscale_all_dim} if isinstance(scaling, YaRN) else {
        "rope_type": "llama3", "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return {"rope_theta": rotary.base, "rope_scaling": common | own}


def _llama3(stated: Settings, latent: bool) -> Settings:
    return {"factor": stated["factor"], "low_freq_factor": stated["low_freq_factor"],
            "high_freq_factor": stated["high_freq_factor"],
            "original_max_length": stated["original_max_position_embeddings"]}


def _yarn(stated: Settings, latent: bool) -> Settings:
    """What is left out is as in transformers' _compute_yarn_parameters."""
    factor, mscale, all_dim = stated["factor"], stated.get("mscale"), stated.get("mscale_all_dim")
    amplitude = stated.get("attention_factor")
    if amplitude is None:
        amplitude = louder(factor, mscale) / louder(factor, all_dim) if mscale and all_dim else louder(factor, 1.0)
    return {"factor": factor, "original_max_length": stated["original_max_position_embeddings"],
            "beta_fast": stated.get("beta_fast") or 32.0, "beta_slow": stated.get("beta_slow") or 1.0,
            "truncate": stated.get("truncate", True), "amplitude": amplitude,
            "mscale_all_dim": (all_dim or 0.0) if latent else 0.0}
