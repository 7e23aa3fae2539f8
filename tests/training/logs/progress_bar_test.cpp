// A bar on a terminal, and a line now and then elsewhere.
#include <tessera/training/progress_bar.h>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/ioctl.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <regex>

#include <tessera/tests/support/temporary_folder.h>

namespace tessera::testing::progress_bar_test {
namespace {

using ::testing::HasSubstr;

/// What `print` writes to standard output, while that is the open file `fd`.
void with_output_to(int fd, const std::function<void()>& print) {
  std::fflush(stdout);
  const int before = ::dup(STDOUT_FILENO);
  ASSERT_GE(::dup2(fd, STDOUT_FILENO), 0);
  print();
  std::fflush(stdout);
  ASSERT_GE(::dup2(before, STDOUT_FILENO), 0);
  ::close(before);
}

std::string printed_to_file(const std::function<void()>& print) {
  const TemporaryFolder folder;
  const auto path = folder.write("output", "");
  const int fd = ::open(path.c_str(), O_WRONLY);
  with_output_to(fd, print);
  ::close(fd);
  return read_text(path);
}

/// On a terminal with so many columns; all times are 0:00.
std::string printed_to_terminal(unsigned short columns, const std::function<void()>& print) {
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_NONBLOCK);
  EXPECT_EQ(::grantpt(terminal), 0);
  EXPECT_EQ(::unlockpt(terminal), 0);
  const int program = ::open(::ptsname(terminal), O_RDWR | O_NOCTTY);
  const winsize size{.ws_row = 25, .ws_col = columns};
  EXPECT_EQ(::ioctl(program, TIOCSWINSZ, &size), 0);
  with_output_to(program, print);
  std::string text;
  std::array<char, 4096> part{};
  for (auto got = ::read(terminal, part.data(), part.size()); got > 0; got = ::read(terminal, part.data(), part.size())) {
    text.append(part.data(), static_cast<size_t>(got));
  }
  ::close(program);
  ::close(terminal);
  return std::regex_replace(text, std::regex("[0-9]+:[0-9][0-9]"), "0:00");
}

TEST(ProgressBar, PrintsAboutTwentyLinesWithoutATerminal) {
  const auto text = printed_to_file([] {
    ProgressBar bar(100);
    bar.begin(0);
    for (int64_t step = 1; step <= 100; ++step) bar.step(step, "loss 2.5");
    bar.line("saved");
    bar.finish();
  });
  EXPECT_THAT(text, ::testing::StartsWith("step 1/100  loss 2.5\nstep 5/100  loss 2.5\n"));
  EXPECT_THAT(text, ::testing::EndsWith("step 100/100  loss 2.5\nsaved\n"));
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 22);
}

TEST(ProgressBar, PrintsALineEachTenthStepWhereTheLastIsNotKnown) {
  const auto text = printed_to_file([] {
    ProgressBar bar(0);
    bar.begin(5);
    for (int64_t step = 6; step <= 30; ++step) bar.step(step, "loss");
  });
  EXPECT_EQ(text, "step 6  loss\nstep 10  loss\nstep 20  loss\nstep 30  loss\n");
}

TEST(ProgressBar, RedrawsOneLineOfATerminal) {
  const auto text = printed_to_terminal(100, [] {
    ProgressBar bar(8);
    bar.begin(4);
    bar.step(4, "begins"); // nothing is done yet: no rest can be told
    bar.step(6, "half");
    bar.line("saved");
    bar.step(8, "whole");
    bar.finish();
    bar.finish();
  });
  EXPECT_THAT(text, HasSubstr("\r\x1b[K4/8 ╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 0:00<?  begins"));
  EXPECT_THAT(text, HasSubstr("\r\x1b[K6/8 ━━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌ 0:00<0:00  half\r\nsaved\r\n"));
  EXPECT_THAT(text, ::testing::EndsWith("8/8 ━━━━━━━━━━━━━━━━━━━━━━━━ 0:00<0:00  whole\r\n"));
}

TEST(ProgressBar, FitsIntoANarrowTerminal) {
  const auto text = printed_to_terminal(20, [] {
    ProgressBar bar(8);
    bar.begin(0);
    bar.step(4, "größer als die Zeile");
  });
  EXPECT_EQ(text, "\r\x1b[K4/8  0:00<0:00  grö"); // 19 columns
}

TEST(ProgressBar, IsSilentWhereItIsTold) {
  const auto text = printed_to_file([] {
    ProgressBar bar(8, /*silent=*/true);
    bar.begin(0);
    bar.step(8, "text");
    bar.line("text");
    bar.finish();
  });
  EXPECT_EQ(text, "");
}

} // namespace
} // namespace tessera::testing::progress_bar_test
