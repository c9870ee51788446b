"""The assembler's fault is found in machine code that has it, and not in correct code."""

import pytest
from gla_kernels.inspection.sass import faulty_descriptors

RIGHT = """
        /*8b30*/                   UIADD3 UR5, UP0, UR15, 0x2, URZ ;
        /*8b50*/                   UMOV UR4, URZ ;
        /*8b60*/                   UIADD3.X UR7, UR4, 0x40000040, URZ, UP0, !UPT ;
        /*8b70*/                   UIADD3.64 UR8, UR18, 0x2, URZ ;
"""


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({}, 0),
        ({"UIADD3.X UR7, UR4,": "UIADD3.X UR15, UR15,"}, 1),
        ({"UMOV UR4, URZ": "UMOV UR4, UR6"}, 1),
        ({"UIADD3.X UR7, UR4, 0x40000040": "UIADD3.X UR7, URZ, -0x7fffffe0"}, 0),
        ({"UIADD3.X UR7, UR4, 0x40000040": "UIADD3.X UR7, UR15, -0x7fffffe0"}, 1),
        ({"UIADD3.X UR7, UR4, 0x40000040": "UIADD3.X UR7, UR15, 0x40"}, 0),
        ({"UIADD3.X UR7, UR4,": "IADD3.X R109, R108,", "UMOV UR4, URZ": "CS2R R108, SRZ"}, 0),
        ({"UIADD3.X UR7, UR4,": "IADD3.X R109, R109,", "UMOV UR4, URZ": "CS2R R108, SRZ"}, 0),
        ({"UIADD3.X UR7, UR4,": "IADD3.X R109, R109,", "UMOV UR4, URZ": "MOV R109, R110"}, 1),
        ({"UMOV UR4, URZ ;": "@UP0 UMOV UR4, URZ ;"}, 1),
        ({"UMOV UR4, URZ ;": "UMOV UR4, URZ ;\n        /*8b58*/                   S2UR UR4, SR_CTAID.X ;"}, 1),
        ({"UMOV UR4, URZ ;": "UMOV UR4, URZ ;\n        /*8b58*/                   REDUX.SUM UR4, R5 ;"}, 1),
        ({"UIADD3.X UR7, UR4, 0x40000040": "UIADD3.X UR7, UR15, UR9"}, 0),
        ({"UMOV UR4, URZ ;": "UMOV UR4, URZ ;\n        /*8b58*/                   UIADD3.64 UR4, UR18, 0x2, URZ ;"}, 1),
        ({"UMOV UR4, URZ ;": "UMOV UR4, URZ ;\n        /*8b58*/              @P0  UIADD3 UR4, UR18, 0x2, URZ ;"}, 1),
    ],
)
def test_a_high_word_made_of_anything_but_0_is_a_fault(changed, faults):
    sass = RIGHT
    for old, new in changed.items():
        assert old in sass
        sass = sass.replace(old, new)
    assert len(faulty_descriptors(sass)) == faults
