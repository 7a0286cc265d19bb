from tests.contracts.test_sections import FurRecord

__all__ = ["FurRecord"]
