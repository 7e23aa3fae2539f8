#include <tessera/training/training_log.h>

#include <c10/util/Exception.h>

#include <set>
#include <string_view>

#include <tessera/training/logs/log_sink.h>

namespace tessera {

class TrainingLog::Files {
 public:
  std::vector<std::unique_ptr<internal::LogSink>> sinks;
};

TrainingLog::TrainingLog(const LogOptions& options, int64_t resumed_step) : files_(std::make_unique<Files>()) {
  TORCH_CHECK_VALUE(resumed_step >= 0, "TrainingLog: the resumed step is ", resumed_step);
  auto& sinks = files_->sinks;
  if (!options.jsonl.empty()) sinks.push_back(internal::open_json_lines(options.jsonl, resumed_step));
  if (!options.tensorboard.empty()) sinks.push_back(internal::open_event_files(options.tensorboard, resumed_step));
  if (!options.csv.empty()) sinks.push_back(internal::open_csv_files(options.csv, resumed_step));
}

TrainingLog::~TrainingLog() = default;
TrainingLog::TrainingLog(TrainingLog&&) noexcept = default;
TrainingLog& TrainingLog::operator=(TrainingLog&&) noexcept = default;

void TrainingLog::write(const LogRecord& record) {
  std::set<std::string_view> names{"kind", "step"};
  const auto check = [&](const std::string& name) {
    TORCH_CHECK_VALUE(names.insert(name).second, "TrainingLog: a record of step ", record.step, " has two values \"", name,
                      "\" (every record has a kind and a step)");
  };
  for (const auto& [name, value] : record.numbers) check(name);
  for (const auto& [name, text] : record.texts) check(name);
  for (const auto& sink : files_->sinks) sink->write(record);
}

void TrainingLog::flush() {
  for (const auto& sink : files_->sinks) sink->flush();
}

} // namespace tessera
