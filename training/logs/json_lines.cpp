#include <c10/util/Exception.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include <tessera/training/logs/log_file.h>
#include <tessera/training/logs/log_sink.h>

namespace tessera::internal {

namespace {

// JSON has no such numbers; the strings are those of a checkpoint's index, and Python's float() reads them.
nlohmann::ordered_json json_number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

/// One object a line.
class JsonLines final : public LogSink {
 public:
  JsonLines(const std::string& path, int64_t resumed_step) : file_(path) {
    file_.replace(resumed_step == 0 ? std::string() : kept_lines(file_.content(), [&](std::string_view line, int64_t number) {
      return step_of(line, number) <= resumed_step;
    }));
  }

  void write(const LogRecord& record) override {
    nlohmann::ordered_json line{{"kind", record.kind}, {"step", record.step}};
    for (const auto& [name, value] : record.numbers) line.emplace(name, json_number(value));
    for (const auto& [name, text] : record.texts) line.emplace(name, text);
    file_.append(line.dump(-1, ' ', /*ensure_ascii=*/false, nlohmann::json::error_handler_t::replace) + '\n');
  }

  void flush() override { file_.flush(); }

 private:
  int64_t step_of(std::string_view line, int64_t number) const {
    const auto json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    const bool is_record = json.is_object() && json.contains("step") && json["step"].is_number_integer();
    TORCH_CHECK(is_record, "cannot resume the log ", file_.path(), ": line ", number, " is no JSON object with a \"step\"");
    return json["step"].get<int64_t>();
  }

  LogFile file_;
};

} // namespace

std::unique_ptr<LogSink> open_json_lines(const std::string& path, int64_t resumed_step) {
  return std::make_unique<JsonLines>(path, resumed_step);
}

} // namespace tessera::internal
