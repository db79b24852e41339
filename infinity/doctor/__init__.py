"""What this machine offers a run and what stands in its way. Looks, tries for a moment, and leaves nothing behind."""

from infinity.doctor.examination import examine
from infinity.doctor.finding import Finding, Status, exit_status

__all__ = ["Finding", "Status", "examine", "exit_status"]
