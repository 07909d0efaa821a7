"""`peftkit quickstart` runs the script of the recipes: data, a score, training, a score."""

from peftkit_cli import about


def test_it_trains_and_measures_before_and_after(peftkit, model_folder, tmp_path, monkeypatch):
    small = tmp_path / "recipes"
    (small / "examples").mkdir(parents=True)
    shipped = about.recipes_folder()
    script = (shipped / "examples" / "quickstart.py").read_text(encoding="utf-8")
    recipe = (shipped / "quickstart.yaml").read_text(encoding="utf-8")
    few = "NUM_TRAIN, NUM_HELD_OUT = 8, 2"
    copy = small / "examples" / "quickstart.py"
    copy.write_text(script.replace("NUM_TRAIN, NUM_HELD_OUT = 640, 64", few))
    model = f"{{model: {model_folder}, quantize: none}}"
    (small / "quickstart.yaml").write_text(
        recipe.replace("{model: smollm2-135m, quantize: nf4}", model)
        .replace("epochs: 0.5", "max_steps: 2")
        .replace("max_length: 256", "max_length: 128")
        .replace("batch_size: 4", "batch_size: 2")
    )
    assert few in copy.read_text()
    assert str(model_folder) in (small / "quickstart.yaml").read_text()
    monkeypatch.setattr(about, "recipes_folder", lambda: small)
    for _ in range(2):  # again, over the first
        done = peftkit("quickstart").succeeded()
        assert "of 2 held-out orders" in done.out
        assert "peftkit chat " in done.out
        assert (tmp_path / "runs/quickstart/adapter_model.safetensors").is_file()
