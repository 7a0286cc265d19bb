from vitlens.commands.ablate.record import AblateRecord
from vitlens.report.sections import Report
REPORT = Report(AblateRecord, sections=())
