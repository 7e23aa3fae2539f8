#include "lockstep.h"

#include <c10/util/StringUtil.h>
#include <tessera/collectives/process_context.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

namespace tessera::testing {

namespace {

using ::testing::TestEventListener;
using ::testing::TestInfo;
using ::testing::TestPartResult;

// How long a rank that failed waits for the others to finish the test: they may be inside a collective it never joined.
constexpr std::chrono::seconds kPatienceAfterFailure(10);

enum class Outcome : char { kPassed = 'p', kFailed = 'f', kLeftEarly = 'x' };

class Lockstep final : public ::testing::TestEventListener {
 public:
  explicit Lockstep(std::unique_ptr<TestEventListener> printer) : printer_(std::move(printer)) {}

  void OnTestPartResult(const TestPartResult& result) override {
    if (result.skipped()) return;
    outcome_ = result.fatally_failed() ? Outcome::kLeftEarly : outcome_ == Outcome::kLeftEarly ? outcome_ : Outcome::kFailed;
    std::printf("[rank %d] %s:%d: Failure\n[rank %d] %s\n", rank(), result.file_name() ? result.file_name() : "unknown file",
                result.line_number(), rank(), readable(result.message()).c_str());
    std::fflush(stdout);
  }

  void OnTestStart(const TestInfo& test) override {
    outcome_ = Outcome::kPassed;
    if (rank() == 0) printer_->OnTestStart(test);
  }

  void OnTestEnd(const TestInfo& test) override {
    if (rank() == 0) printer_->OnTestEnd(test);
    vote(c10::str(test.test_suite_name(), ".", test.name()));
  }

  void OnTestProgramStart(const ::testing::UnitTest& all) override {
    if (rank() == 0) printer_->OnTestProgramStart(all);
  }
  void OnTestIterationStart(const ::testing::UnitTest& all, int i) override {
    if (rank() == 0) printer_->OnTestIterationStart(all, i);
  }
  void OnEnvironmentsSetUpStart(const ::testing::UnitTest&) override {}
  void OnEnvironmentsSetUpEnd(const ::testing::UnitTest&) override {}
  void OnEnvironmentsTearDownStart(const ::testing::UnitTest&) override {}
  void OnEnvironmentsTearDownEnd(const ::testing::UnitTest&) override {}
  void OnTestIterationEnd(const ::testing::UnitTest& all, int i) override {
    if (rank() == 0) printer_->OnTestIterationEnd(all, i);
  }
  void OnTestProgramEnd(const ::testing::UnitTest& all) override {
    if (rank() == 0) printer_->OnTestProgramEnd(all);
  }

 private:
  static int rank() { return process_context().rank(); }

  // Indents the lines after the first, and leaves out the C++ stack of a c10::Error.
  static std::string readable(const std::string& message) {
    std::istringstream lines(message);
    std::string text;
    for (std::string line; std::getline(lines, line);)
      if (line.find("  frame #") == std::string::npos) text += (text.empty() ? "" : "\n  ") + line;
    return text;
  }

  // Not by an exception: gtest would take it for a failure of the next test.
  [[noreturn]] static void end_run(const std::string& message) {
    std::printf("[rank %d] %s\n", rank(), message.c_str());
    std::fflush(stdout);
    std::_Exit(1);
  }

  // Tests may destroy and re-create the process group, so the store is asked for each time.
  void vote(const std::string& test) {
    auto& context = process_context();
    const auto key = [&](int rank) { return c10::str("lockstep/", test_number_, "/", rank); };
    auto store = context.store();
    store->set(key(context.rank()), std::string(1, static_cast<char>(outcome_)));
    std::vector<std::string> keys;
    for (int r = 0; r < context.world_size(); ++r) keys.push_back(key(r));
    const std::chrono::milliseconds patience =
        outcome_ == Outcome::kPassed ? context.options().timeout : std::chrono::milliseconds(kPatienceAfterFailure);
    std::vector<int> missing, left;
    try {
      store->wait(keys, patience);
    } catch (const std::exception&) {
      for (int r = 0; r < context.world_size(); ++r)
        if (!store->check({keys[r]})) missing.push_back(r);
    }
    if (!missing.empty())
      end_run(c10::str(test, ": ranks ", c10::Join(", ", missing), " did not finish the test in ", patience.count(), " ms"));
    for (int r = 0; r < context.world_size(); ++r)
      if (store->get_to_str(keys[r]) == std::string(1, static_cast<char>(Outcome::kLeftEarly))) left.push_back(r);
    if (!left.empty() && static_cast<int>(left.size()) != context.world_size())
      end_run(c10::str(test, ": ranks ", c10::Join(", ", left),
                       " left the test early, the others did not: the ranks are out of step, and the run ends here"));
    ++test_number_;
  }

  std::unique_ptr<TestEventListener> printer_;
  Outcome outcome_ = Outcome::kPassed;
  int test_number_ = 0;
};

} // namespace

void report_in_lockstep(::testing::UnitTest& tests) {
  auto& listeners = tests.listeners();
  std::unique_ptr<::testing::TestEventListener> printer(listeners.Release(listeners.default_result_printer()));
  listeners.Append(new Lockstep(std::move(printer)));
}

} // namespace tessera::testing
