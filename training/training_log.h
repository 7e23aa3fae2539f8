#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// Says where a training writes its numbers. Only the first rank writes. An empty path: not there.
struct LogOptions {
  /// A file of JSON objects, one a line: kind, step, the numbers and the texts by name. Numbers have as many digits as it takes
  /// to read the same double back; those that JSON lacks are the strings "nan", "inf" and "-inf".
  std::string jsonl;
  /// A folder of TensorBoard's event files, one for each run. A number's name is its tag ("Train/Samples/train_loss"), its value
  /// a 32-bit float, as TensorBoard's scalars are. Texts are left out.
  std::string tensorboard;
  /// A folder with a file for each number, with the columns step and value. The file's name is the number's with '_' for '/' and
  /// ' ', and ".csv", as DeepSpeed's csv_monitor names it. Texts are left out.
  std::string csv;
  int64_t every = 1; ///< steps between two lines of step numbers
  /// Step lines tell the seconds of forward, backward, norm and optimizer too. On a device each part waits for its work, which
  /// makes steps slower.
  bool breakdown = false;
  bool progress = true; ///< a bar on a terminal, otherwise a line now and then, on standard output
};

/// One line of a log: what happened (of a Trainer "step", "evaluation", "save", "save of the best", "resume", "stop"), after how
/// many steps, and numbers by name.
struct LogRecord {
  std::string kind;
  int64_t step = 0;
  std::vector<std::pair<std::string, double>> numbers;
  std::vector<std::pair<std::string, std::string>> texts;
};

/// The files of `LogOptions`; `every` and `progress` are for who writes to them. Make one on the rank that writes. One thread at
/// a time.
///
/// Opening with `resumed_step` drops the lines of later steps, which a run that was cut off has written, and a last line that was
/// cut off itself; event files and CSV files of other programs in the folders stay as they are. Errors name the file and the
/// cause: a folder that cannot be made, a file that is read-only, a full disk; on a resume, a line of the file that is no record.
class TrainingLog {
 public:
  /// `resumed_step` 0: a new training, which empties the files.
  TrainingLog(const LogOptions& options, int64_t resumed_step);
  ~TrainingLog();
  TrainingLog(TrainingLog&&) noexcept;
  TrainingLog& operator=(TrainingLog&&) noexcept;

  /// What is written is in the files when the call returns, so that a process that is killed leaves it. An error for two values
  /// of one name, and for names whose CSV files would be the same; where it throws, later kinds of files lack the record.
  void write(const LogRecord& record);
  /// Waits until what was written is on the disk, so that a machine that is lost leaves it too.
  void flush();

 private:
  class Files;
  std::unique_ptr<Files> files_;
};

} // namespace tessera
