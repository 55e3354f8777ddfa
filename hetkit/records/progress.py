"""How far a session is, from where its ranks stand and how long its steps take."""

from hetkit.planning.course import Course
from hetkit.planning.schedule import epoch_steps
from hetkit.records.book import Book
from hetkit.records.status import Progress


def progress_of(course: Course, book: Book) -> Progress:
    """Returns how far the training is, with the time that is left at the present speed."""
    plan = course.plan
    steps = plan.epoch_steps if plan else epoch_steps(course.samples, course.settings.global_batch)
    step_s = book.recent_step_s()
    left = (course.target - course.epoch) * steps - (course.done - course.epoch_first_step)
    return Progress(
        epoch=course.epoch,
        epochs_target=course.target,
        step=course.done,
        epoch_first_step=course.epoch_first_step,
        epoch_steps=steps,
        eta_s=max(0, left) * step_s if step_s and course.at_work else None,
        samples_per_s=book.recent_samples_per_s(),
    )
