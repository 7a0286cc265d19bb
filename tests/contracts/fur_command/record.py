from tests.contracts import test_sections

RECORD = test_sections.FurRecord
