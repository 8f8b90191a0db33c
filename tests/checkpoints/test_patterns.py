import pytest

from petit_plugin.checkpoints.patterns import Pattern, PatternSet


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "language_model.lm_head", True),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_up_proj", False),
        ("model.layers.0.mlp.shared_expert", "model.layers.0.mlp.shared_expert.up_proj", True),
        ("model.layers.0.mlp.shared_expert", "model.layers.0.mlp.shared_expert_gate", False),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        # "path*" is the path and what is below it, never a longer name
        ("model.layers.1*", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1*", "model.layers.1", True),
        ("model.layers.1*", "model.layers.10.mlp.up_proj", False),
        ("mtp*", "mtp.layers.0.eh_proj", True),
        ("mtp*", "mtp_block.fc", False),
        ("*.mlp.gate*", "model.layers.3.mlp.gate", True),
        ("*.mlp.gate*", "model.layers.3.mlp.gate_proj", False),
        ("model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", True),
        # other wildcards keep their ordinary meaning
        ("*.q_proj", "model.layers.7.self_attn.q_proj", True),
        ("*router*", "model.layers.7.feed_forward.router", True),
        ("*vision*", "model.vision_tower.blocks.0.fc1", True),
        ("model.layers.*.self_attn", "model.layers.4.self_attn", True),
        ("model.layers.4.*", "model.layers.4.mlp.up_proj", True),
        ("model.layers.4.*", "model.layers.40.mlp.up_proj", False),
        ("*", "anything.at.all", True),
        # regular expressions match from the start
        ("re:.*v_proj", "model.layers.0.self_attn.v_proj", True),
        ("re:layers", "model.layers.0", False),
        (r"re:model\.layers\.(5|6)\..*", "model.layers.5.mlp.up_proj", True),
    ],
)
def test_pattern(pattern: str, name: str, expected: bool) -> None:
    assert Pattern(pattern).matches(name) is expected
    assert PatternSet([Pattern("nothing.like.it"), Pattern(pattern)]).matches(name) is expected


def _prefix(names: list[str]) -> list[str]:
    return [n.replace("model.", "language_model.model.", 1) if n.startswith("model.") else n for n in names]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("model.layers.0.mlp.gate", "language_model.model.layers.0.mlp.gate", True),
        ("model*", "language_model.model.layers.0.mlp.gate", True),  # maps only as "model.*"
        ("model.layers.1*", "language_model.model.layers.1.x", True),
        ("model.layers.1*", "language_model.model.layers.11.x", False),
        (r"re:model\.layers\.1\..*", "language_model.model.layers.1.x", True),
        (r"re:model\.layers\.1\..*", "language_model.model.layers.2.x", False),
        (r"re:.*\.q_proj$", "language_model.model.layers.1.q_proj", True),
        ("lm_head", "lm_head", True),
    ],
)
def test_mapped_names(pattern: str, name: str, expected: bool) -> None:
    assert any(p.matches(name) for p in Pattern(pattern).mapped(_prefix)) is expected


def test_mapper_may_drop_a_name() -> None:
    assert Pattern("visual.merger").mapped(lambda names: []) == ()


def test_regex_names_a_fused_module_only_by_its_whole_leaf() -> None:
    name = "visual.blocks.0.attn.qkv_proj"
    assert not PatternSet([Pattern("re:.*v_proj")]).names_directly(name)
    assert PatternSet([Pattern(r"re:.*\.qkv_proj.*")]).names_directly(name)
    assert PatternSet([Pattern("visual.blocks.0.attn.qkv_proj")]).names_directly(name)
    assert PatternSet([Pattern("*.qkv_proj")]).names_directly(name)
