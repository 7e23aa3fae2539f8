// Logs come back as they were written, and a resume drops what came after.
#include <tessera/training/training_log.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include <tessera/training/logs/event_record.h>

#include <tessera/tests/support/draw.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/sweep.h>
#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::training_log_test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> lines_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> lines;
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::vector<std::string> file_names(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  return names;
}

/// The steps of all records of a folder's event files, file by file.
std::vector<int64_t> event_steps(const std::filesystem::path& folder) {
  std::vector<int64_t> steps;
  for (const auto& name : file_names(folder)) {
    const auto text = read_text(folder / name);
    std::string_view rest = text;
    for (auto record = internal::parse_record(rest); record; record = internal::parse_record(rest)) {
      steps.push_back(record->step);
      rest.remove_prefix(record->bytes);
    }
    EXPECT_TRUE(rest.empty()) << name << " ends with what is no record";
  }
  return steps;
}

LogRecord step_record(int64_t step, double loss = 0.5) {
  return {"step", step, {{"loss", loss}, {"Train/Samples/lr", 1e-3}}, {}};
}

LogOptions all_kinds(const TemporaryFolder& folder) {
  return {.jsonl = folder.file("log.jsonl"), .tensorboard = folder.file("tb"), .csv = folder.file("csv")};
}

TEST(TrainingLog, WritesJsonThatReadsTheSameNumbers) {
  const TemporaryFolder folder;
  Draw draw(test_seed());
  std::vector<double> values{0, -0.0, 0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308, -1e-300, 123456789012345678.0};
  for (int i = 0; i < 500; ++i) {
    const auto value = std::bit_cast<double>((draw.seed() << 32) ^ draw.seed());
    if (std::isfinite(value)) values.push_back(value);
  }
  const auto path = folder.file("deep/er/log.jsonl"); // whose folders are made
  {
    TrainingLog log({.jsonl = path}, 0);
    for (size_t i = 0; i < values.size(); ++i) log.write({"step", static_cast<int64_t>(i), {{"loss", values[i]}}, {}});
    log.write({"stop", 600, {{"a", kNaN}, {"b", kInfinity}, {"c", -kInfinity}}, {{"why", "the \"loss\"\nis ü \xff"}}});
  }
  const auto lines = lines_of(read_text(path));
  ASSERT_EQ(lines.size(), values.size() + 1);
  for (size_t i = 0; i < values.size(); ++i) {
    const auto json = nlohmann::json::parse(lines[i]);
    EXPECT_EQ(json["kind"], "step");
    EXPECT_EQ(json["step"], i);
    EXPECT_EQ(std::bit_cast<uint64_t>(json["loss"].get<double>()), std::bit_cast<uint64_t>(values[i])) << lines[i];
  }
  EXPECT_EQ(lines.back(), R"({"kind":"stop","step":600,"a":"nan","b":"inf","c":"-inf","why":"the \"loss\"\nis ü )"
                          "\xef\xbf\xbd\"}"); // what is not UTF-8 is replaced
}

TEST(TrainingLog, WritesAFileOfColumnsForEachNumber) {
  const TemporaryFolder folder;
  TrainingLog log({.csv = folder.file("csv")}, 0);
  log.write({"step", 1, {{"Train/Samples/train_loss", 0.1}, {"lr", 1e-5}}, {{"text", "is left out"}}});
  log.write({"step", 2, {{"Train/Samples/train_loss", -kNaN}}, {}});
  log.write({"evaluation", 2, {{"Train/Samples/train_loss", -kInfinity}}, {}});
  EXPECT_EQ(file_names(folder.path() / "csv"), (std::vector<std::string>{"Train_Samples_train_loss.csv", "lr.csv"}));
  EXPECT_EQ(read_text(folder.path() / "csv" / "Train_Samples_train_loss.csv"), "step,value\n1,0.1\n2,nan\n2,-inf\n");
  EXPECT_EQ(read_text(folder.path() / "csv" / "lr.csv"), "step,value\n1,1e-05\n");
  EXPECT_THROWS_WITH(log.write({"step", 3, {{"Train_Samples_train_loss", 1}}, {}}),
                     "the numbers \"Train/Samples/train_loss\" and \"Train_Samples_train_loss\" of a log would both be in");
}

TEST(TrainingLog, DropsLaterStepsOfARunThatWasCutOff) {
  const TemporaryFolder folder;
  const auto options = all_kinds(folder);
  {
    TrainingLog log(options, 0);
    for (int64_t step = 1; step <= 20; ++step) log.write(step_record(step));
    log.flush();
  }
  for (const int64_t resumed : {17, 9, 4}) {
    {
      TrainingLog log(options, resumed);
      log.write(step_record(resumed + 1, 7));
      log.write(step_record(30, 7));
    }
    const auto lines = lines_of(read_text(options.jsonl));
    ASSERT_EQ(std::ssize(lines), resumed + 2);
    for (int64_t step = 1; step <= resumed + 1; ++step) {
      const auto json = nlohmann::json::parse(lines[static_cast<size_t>(step - 1)]);
      EXPECT_EQ(json["step"], step);
      EXPECT_EQ(json["loss"], step <= resumed ? 0.5 : 7);
    }
    for (const auto* name : {"loss.csv", "Train_Samples_lr.csv"}) {
      const auto rows = lines_of(read_text(std::filesystem::path(options.csv) / name));
      ASSERT_EQ(std::ssize(rows), resumed + 3) << name;
      EXPECT_EQ(rows[static_cast<size_t>(resumed)].substr(0, rows[static_cast<size_t>(resumed)].find(',')),
                std::to_string(resumed));
    }
    auto steps = event_steps(options.tensorboard);
    std::erase(steps, 0); // what begins each file
    std::vector<int64_t> expected;
    for (int64_t step = 1; step <= resumed; ++step) expected.push_back(step);
    for (const int64_t step : {resumed + 1, resumed + 1, int64_t{30}})
      expected.push_back(step); // the first one says that it starts
    EXPECT_EQ(steps, expected);
  }
  TrainingLog log(options, 0); // a new training
  EXPECT_EQ(read_text(options.jsonl), "");
  EXPECT_TRUE(file_names(options.csv).empty());
  EXPECT_EQ(event_steps(options.tensorboard), std::vector<int64_t>{0});
}

/// A process that was killed, or a machine that was lost, may leave any beginning of what it wrote.
TEST(TrainingLog, GoesOnAfterLinesThatWereCutOff) {
  const TemporaryFolder folder;
  const auto options = all_kinds(folder);
  {
    TrainingLog log(options, 0);
    for (int64_t step = 1; step <= 3; ++step) log.write(step_record(step));
  }
  const auto event_file = std::filesystem::path(options.tensorboard) / file_names(options.tensorboard).at(0);
  const auto csv_file = std::filesystem::path(options.csv) / "loss.csv";
  const auto jsonl = read_text(options.jsonl), csv = read_text(csv_file), events = read_text(event_file);
  for (size_t less = 1; less < 30; ++less) {
    write_text(options.jsonl, jsonl.substr(0, jsonl.size() - less));
    write_text(csv_file, csv.substr(0, csv.size() - std::min<size_t>(less, 6)));
    write_text(event_file, events.substr(0, events.size() - less));
    {
      TrainingLog log(options, 3);
      log.write(step_record(4));
    }
    EXPECT_EQ(lines_of(read_text(options.jsonl)).size(), 3U);
    EXPECT_EQ(read_text(csv_file), "step,value\n1,0.5\n2,0.5\n4,0.5\n");
    EXPECT_EQ(event_steps(options.tensorboard), (std::vector<int64_t>{0, 1, 2, 0, 4, 4}));
    for (const auto& name : file_names(options.tensorboard)) {
      if (name != event_file.filename()) std::filesystem::remove(std::filesystem::path(options.tensorboard) / name);
    }
  }
}

TEST(TrainingLog, LeavesOtherProgramsFiles) {
  const TemporaryFolder folder;
  const auto options = all_kinds(folder);
  std::filesystem::create_directory(options.csv);
  std::filesystem::create_directory(options.tensorboard);
  const auto table = folder.write("csv/table.csv", "name,step\nloss,3\n");
  const auto events = folder.write("tb/events.out.tfevents.1.host", "another writer's");
  for (const int64_t resumed : {0, 5}) {
    TrainingLog log(options, resumed);
    log.write(step_record(6));
    EXPECT_EQ(read_text(table), "name,step\nloss,3\n");
    EXPECT_EQ(read_text(events), "another writer's");
  }
  const auto text = folder.write("notes.jsonl", "{\"step\": 1}\nIt is a truth\n");
  EXPECT_THROWS_WITH(TrainingLog({.jsonl = text}, 5), text + ": line 2 is no JSON object with a \"step\"");
  folder.write("csv/loss.csv", "step,value\n1,2\nabc\n");
  EXPECT_THROWS_WITH(TrainingLog({.csv = options.csv}, 5), "loss.csv: line 3 is no \"step,value\"");
}

TEST(TrainingLog, NamesTheFileAndTheCause) {
  const TemporaryFolder folder;
  const auto file = folder.write("file", "");
  EXPECT_THROWS_WITH(TrainingLog({.jsonl = file + "/log.jsonl"}, 0),
                     "cannot make the folder " + file + " of a log: Not a directory");
  EXPECT_THROWS_WITH(TrainingLog({.csv = file + "/csv"}, 0), "cannot make the folder " + file + "/csv of a log: Not a directory");
  EXPECT_THROWS_WITH(TrainingLog({.tensorboard = file}, 0), "cannot make the folder " + file + " of a log: Not a directory");
  EXPECT_THROWS_WITH(TrainingLog({.jsonl = folder.path().string()}, 0),
                     "cannot open the log " + folder.path().string() + " for writing: Is a directory");
  TrainingLog full({.jsonl = "/dev/full"}, 0);
  EXPECT_THROWS_WITH(full.write(step_record(1)), "cannot write the log /dev/full: No space left on device");
  TrainingLog log({.jsonl = folder.file("log.jsonl")}, 0);
  EXPECT_THROWS_WITH(log.write({"step", 1, {{"a", 1}, {"a", 2}}, {}}), "a record of step 1 has two values \"a\"");
  EXPECT_THROWS_WITH(log.write({"step", 1, {{"step", 1}}, {}}), "has two values \"step\"");
  EXPECT_EQ(read_text(folder.file("log.jsonl")), "");
  EXPECT_THROWS_WITH(TrainingLog({}, -1), "the resumed step is -1");
  TrainingLog({}, 0).write(step_record(1)); // goes nowhere
}

/// Writes records while no file may have more than 500 bytes, and returns which one failed.
int64_t write_until_full(TrainingLog& log, const std::string& error) {
  rlimit before{};
  EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit limit{.rlim_cur = 500, .rlim_max = before.rlim_max};
  EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  int64_t step = 1;
  auto found = error_of([&] { log.write(step_record(step)); });
  while (found == "no error" && step < 100) found = error_of([&] { log.write(step_record(++step)); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(found, ::testing::HasSubstr(error));
  return step;
}

/// A disk that is full in the middle of a record, as the limit of a file's size makes it.
TEST(TrainingLog, LeavesNoPartOfARecord) {
  const TemporaryFolder folder;
  const auto path = folder.file("log.jsonl");
  TrainingLog lines({.jsonl = path}, 0);
  const auto failed_line = write_until_full(lines, "cannot write the log " + path + ": File too large");
  EXPECT_EQ(std::ssize(lines_of(read_text(path))), failed_line - 1);
  EXPECT_TRUE(read_text(path).ends_with("}\n"));
  lines.write(step_record(failed_line)); // there is room again
  EXPECT_EQ(std::ssize(lines_of(read_text(path))), failed_line);

  TrainingLog events({.tensorboard = folder.file("tb")}, 0);
  const auto failed_event = write_until_full(events, "cannot write the log " + folder.file("tb") + "/events.out.tfevents.");
  events.write(step_record(failed_event));
  EXPECT_EQ(std::ssize(event_steps(folder.file("tb"))), failed_event + 1); // and what begins the file
}

/// As a user who may not write: root may everything, so that a test by root becomes nobody.
class Nobody {
 public:
  Nobody() : is_root_(::geteuid() == 0), is_nobody_(!is_root_ || ::seteuid(65534) == 0) {}
  Nobody(const Nobody&) = delete;
  Nobody& operator=(const Nobody&) = delete;
  ~Nobody() {
    if (is_root_) std::ignore = ::seteuid(0);
  }
  bool holds() const { return is_nobody_; }

 private:
  bool is_root_, is_nobody_;
};

TEST(TrainingLog, NamesWhatIsReadOnly) {
  const TemporaryFolder folder;
  const auto file = folder.write("log.jsonl", "");
  ASSERT_EQ(::chmod(file.c_str(), 0444), 0);
  std::filesystem::create_directory(folder.path() / "closed");
  ASSERT_EQ(::chmod((folder.path() / "closed").c_str(), 0555), 0);
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  const Nobody nobody;
  if (!nobody.holds()) GTEST_SKIP() << "this process cannot become another user";
  EXPECT_THROWS_WITH(TrainingLog({.jsonl = file}, 0), "cannot open the log " + file + " for writing: Permission denied");
  for (const auto& options : {LogOptions{.csv = folder.file("closed")}, LogOptions{.tensorboard = folder.file("closed")}}) {
    EXPECT_THROWS_WITH(TrainingLog(options, 0),
                       "cannot write to the folder " + folder.file("closed") + " of a log: Permission denied");
  }
  EXPECT_THROWS_WITH(TrainingLog({.csv = folder.file("closed/new")}, 0),
                     "cannot make the folder " + folder.file("closed/new") + " of a log: Permission denied");
}

/// The test vectors of RFC 3720, B.4.
TEST(EventRecord, ComputesCastagnolisChecksum) {
  EXPECT_EQ(internal::crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(internal::crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  EXPECT_EQ(internal::crc32c("123456789"), 0xe3069283U);
}

TEST(EventRecord, FindsDamage) {
  const auto record = internal::scalars_record(1.5, 300, {{"loss", 0.5}});
  const auto parsed = internal::parse_record(record + "rest");
  ASSERT_TRUE(parsed);
  EXPECT_EQ(parsed->bytes, record.size());
  EXPECT_EQ(parsed->step, 300);
  for (size_t i = 0; i < record.size(); ++i) {
    auto damaged = record;
    damaged[i] = static_cast<char>(damaged[i] ^ 4);
    EXPECT_FALSE(internal::parse_record(damaged)) << "byte " << i;
    EXPECT_FALSE(internal::parse_record(std::string_view(record).substr(0, i))) << i << " bytes";
  }
}

} // namespace
} // namespace tessera::testing::training_log_test
