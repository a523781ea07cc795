import io
import json
import sys

import pytest
from PIL import Image

from hyper_parallel.data.rows import JsonLines, SavedDataset, load_image


def test_rows_by_line_with_blank_lines_and_unicode(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"text": "größe"}\n\n  \n{"text": "漢字"}\r\n{"text": "last, no newline"}', encoding="utf-8")
    rows = JsonLines(path)
    assert [rows[i]["text"] for i in range(len(rows))] == ["größe", "漢字", "last, no newline"]
    assert [rows.name(i) for i in range(3)] == [f"{path}:{line}" for line in (1, 4, 5)]


def test_rows_are_parsed_when_asked_for(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n{"text": \n["list"]\n')
    rows = JsonLines(path)
    assert rows[0] == {"text": "fine"}
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: not valid JSON"):
        rows[1]
    with pytest.raises(ValueError, match=r"rows\.jsonl:3: expected a JSON object, got list"):
        rows[2]


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match=r"missing\.jsonl is not a file"):
        JsonLines(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="holds no rows"):
        JsonLines(tmp_path / "empty.jsonl")


def test_saved_dataset(tmp_path, monkeypatch):
    import datasets

    table = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])
    table.save_to_disk(tmp_path / "one")
    rows = SavedDataset(tmp_path / "one")
    assert (len(rows), rows[1], rows.name(1)) == (2, {"text": "b"}, f"{tmp_path / 'one'}[1]")
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"holds the splits \['train'\]: give one of them, such as .*splits/train"):
        SavedDataset(tmp_path / "splits")
    assert len(SavedDataset(tmp_path / "splits" / "train")) == 2
    with pytest.raises(ValueError, match="is not a directory"):
        SavedDataset(tmp_path / "missing")
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="not written by datasets' save_to_disk"):
        SavedDataset(tmp_path / "other")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r'pip install "hyper-parallel\[datasets\]"'):
        SavedDataset(tmp_path / "one")


def test_images_from_paths_bytes_and_pil(pictures):
    expected = Image.open(pictures / "a.png")
    encoded = io.BytesIO()
    expected.save(encoded, format="PNG")
    sources = ["a.png", str(pictures / "a.png"), expected, {"bytes": None, "path": "a.png"}]
    for source in [*sources, {"bytes": encoded.getvalue(), "path": None}]:
        assert load_image(source, pictures).tobytes() == expected.tobytes()


def test_stored_rotation_is_applied(tmp_path):
    image = Image.new("RGB", (4, 2))
    exif = image.getexif()
    exif[0x0112] = 6  # orientation: turned by 90 degrees
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert load_image("turned.jpg", tmp_path).size == (2, 4)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.png", "cannot read the image .*missing.png"),
        ("broken.png", "cannot read the image .*broken.png"),
        (7, "an image must be a path, a PIL image or .*, got 7"),
        ({"bytes": None, "path": None}, "an image must be a path"),
    ],
)
def test_bad_images(tmp_path, source, message):
    (tmp_path / "broken.png").write_text(json.dumps("not an image"))
    with pytest.raises(ValueError, match=message):
        load_image(source, tmp_path)
