from tests.contracts.test_sections import REPORT

__all__ = ["REPORT"]
