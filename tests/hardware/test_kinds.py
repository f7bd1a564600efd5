"""What an entry of the hardware files may be; a wrong one is named, with file and key."""

from __future__ import annotations

import pytest
import yaml
from hardware_parts import write

from gradus import hardware
from gradus.errors import UserError

pytestmark = pytest.mark.usefixtures("own_files")


def test_groups_lie_on_nodes():
    cluster = hardware.cluster("1024xH100")
    assert cluster.link_of(8, 1) == (8, 1)
    assert cluster.link_of(16, 1) == (8, 2)
    assert cluster.link_of(4, 8) == (1, 4)
    assert cluster.link_of(4, 2) == (4, 1)
    assert cluster.link_of(12, 1) == (8, 2), "a last node that is not full is one all the same"
    assert cluster.link_of(3, 4) == (2, 2)


GOOD = {"peaks": {"fp32": "1 TFLOP/s"}, "memory": "4 GiB", "bandwidth": "5 GB/s"}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"memry": "4 GiB"}, r"devices\.X\.memry: unknown key\. Did you mean memory\?"),
        ({"memory": 4}, r"devices\.X\.memory: 4 is not a number with a unit\. Units: B, kB, MB, GB"),
        ({"memory": "4 Gib"}, r"devices\.X\.memory: '4 Gib': 'Gib' is not a unit of bytes\. Did you mean GiB"),
        ({"memory": "4 GB/s"}, r"devices\.X\.memory: '4 GB/s': 'GB/s' is not a unit of bytes"),
        ({"memory": "four GiB"}, r"devices\.X\.memory: 'four GiB' is not a number"),
        ({"memory": "-4 GiB"}, r"devices\.X\.memory: '-4 GiB': -4 is not a positive number"),
        ({"memory": "nan GiB"}, r"devices\.X\.memory"),
        ({"memory": "1-2 GiB"}, r"devices\.X\.memory: '1-2 GiB': 1-2 is not a positive number"),
        ({"memory": None}, r"devices\.X\.memory: missing"),
        ({"bandwidth": None}, r"devices\.X\.bandwidth: missing"),
        ({"usable": "5 GiB"}, r"devices\.X\.usable: more than memory"),
        ({"peaks": {"fp33": "1 TFLOP/s"}}, r"devices\.X\.peaks\.fp33: 'fp33': Input should be 'fp32', 'tf32'"),
        ({"peaks": {"fp32": "1 TB/s"}}, r"devices\.X\.peaks\.fp32: '1 TB/s': 'TB/s' is not a unit of operations/s"),
        ({"peaks": {}}, r"devices\.X\.peaks: \{\}: .* at least 1"),
        ({"peaks": 3}, r"devices\.X\.peaks: 3: expected keys with values"),
        ({"power": "4 GW"}, r"devices\.X\.power: '4 GW'"),
        ({"node": 0}, r"devices\.X\.node: 0: .* greater than or equal to 1"),
        ({"node": 2.5}, r"devices\.X\.node: 2.5: .* valid integer"),
        ({"kind": "fpga"}, r"devices\.X\.kind: 'fpga': .* 'gpu', 'tpu', 'npu' or 'cpu'"),
        ({"link": "NVLink 7"}, r"devices\.X\.link: 'NVLink 7' is not a known link\. Did you mean NVLink"),
        ({"link": {"bandwidth": "5 GB"}}, r"devices\.X\.link\.bandwidth: '5 GB'"),
        ({"link": {"bandwidth": "5 GB/s", "efficiency": 80}}, r"devices\.X\.link\.efficiency: 80: .* less than or equal to 1"),
        ({"driver": "("}, r"devices\.X\.driver: '\(' is not a pattern"),
        ({"date": "yesterday"}, r"devices\.X\.date: 'yesterday' is not a date"),
        ({"aliases": [3090]}, r"devices\.X\.aliases"),
        ({"measured": 3}, r"devices\.X\.measured"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path, more, says):
    entry = {k: v for k, v in {**GOOD, **more}.items() if v is not None}
    file = write(tmp_path / "mine.yaml", yaml.safe_dump({"devices": {"X": entry}}))
    with pytest.raises(UserError, match=says) as error:
        hardware.find("X", file)
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)
