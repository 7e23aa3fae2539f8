#pragma once

// Internal: events as lines of a log.

#include <string>

#include <tessera/training/trainer_events.h>
#include <tessera/training/training_log.h>

namespace tessera::internal {

LogRecord record_of(const StepEvent& event);
LogRecord record_of(const EvaluationEvent& event);
LogRecord record_of(const SaveEvent& event);
LogRecord record_of(const ResumeEvent& event);
LogRecord record_of(const StopEvent& event);

/// What a progress bar shows.
std::string line_of(const StepEvent& event);
std::string line_of(const EvaluationEvent& event);
std::string line_of(const SaveEvent& event);
std::string line_of(const ResumeEvent& event);
std::string line_of(const StopEvent& event);

} // namespace tessera::internal
