"""The assembler's faults are found in machine code that has them, and not in correct code."""

import pytest
from gla_kernels.inspection.sass import faulty_descriptors, unwritten_registers

RIGHT = """
        /*8b30*/                   UIADD3 UR5, UP0, UR15, 0x2, URZ ;
        /*8b50*/                   UMOV UR4, URZ ;
        /*8b60*/                   UIADD3.X UR7, UR4, 0x40000040, URZ, UP0, !UPT ;
        /*8b70*/                   UIADD3.64 UR8, UR18, 0x2, URZ ;
"""


def with_changes(sass, changed):
    for old, new in changed.items():
        assert old in sass
        sass = sass.replace(old, new)
    return sass


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
    assert len(faulty_descriptors(with_changes(RIGHT, changed))) == faults


# A loop whose branches take the same descriptor, which only the first one computes.
BRANCHES = """
        /*0010*/                   ULDC.64 UR4, c[0x0][0x208] ;
        /*0020*/                   UMOV UR8, 0x4000 ;
        /*0030*/                   UMOV UR9, URZ ;
.L_x_0:
        /*0040*/              @!P2 BRA `(.L_x_1) ;
        /*0050*/                   UIADD3.64 UR10, UR8, 0x80, URZ ;
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0070*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0080*/                   HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8].tnspB, R24, gsb0 ;
.L_x_2:
        /*0090*/                   STG.E desc[UR4][R2.64], R24 ;
        /*00a0*/               @P1 BRA `(.L_x_0) ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3) ;
"""


@pytest.mark.parametrize(
    ("changed", "faults"),
    [
        ({}, 1),
        ({"UMOV UR9, URZ ;": "NOP ;"}, 3),
        ({"UMOV UR8, 0x4000": "UIADD3.64 UR10, UR4, 0x80, URZ ;\n        /*0028*/  UMOV UR8, 0x4000"}, 0),
        ({"UMOV UR8, 0x4000": "UIADD3 UR10, UR4, 0x80, URZ ;\n        /*0028*/  UMOV UR8, 0x4000"}, 1),
        ({".L_x_1:\n": ".L_x_1:\n        /*0078*/  UMOV UR10, UR4 ;\n        /*0079*/  UMOV UR11, UR5 ;\n"}, 0),
        ({"@!P2 BRA `(.L_x_1)": "NOP"}, 0),
        ({"ULDC.64 UR4": "ULDC UR4"}, 2),
        ({"BRA `(.L_x_2)": "NOP"}, 1),
        ({"@!P2 BRA `(.L_x_1)": "BRA !P2, `(.L_x_1)"}, 1),
        ({"@!P2 BRA `(.L_x_1)": "BRA `(.L_x_1)"}, 1),
        ({"UMOV UR9, URZ ;": "ELECT P0, UR9 ;"}, 1),
        ({"UMOV UR9, URZ ;": "UR2UP UPR, UR9 ;"}, 4),
        ({"UMOV UR9, URZ ;": "UIMAD.WIDE UR8, UR4, UR5, UR6 ;"}, 2),
        ({"desc[UR4][R2.64], R24": "desc[UR4][R2.64+UR8], R24"}, 1),
        ({"R24, R56, gdesc[UR8].tnspB": "R24, gdesc[UR4].tnspB"}, 1),
        ({"R24, R56, gdesc[UR8].tnspB": "R24, R56, gdesc[UR6].tnspB"}, 0),
    ],
)
def test_a_register_that_one_branch_alone_writes_is_a_fault(changed, faults):
    assert len(unwritten_registers(with_changes(BRANCHES, changed))) == faults
