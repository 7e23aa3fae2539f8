#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>

#include <tessera/collectives/launch.h>
#include <tessera/collectives/process_context.h>
#include <tessera/collectives/record_error.h>
#include <tessera/training/train_main.h>

namespace tessera {

namespace {

constexpr int kTerminated = 143; // 128 + SIGTERM, as shells say it
constexpr int kUsage = 2;

struct CommandLine {
  std::string config;
  std::optional<int> ranks;
  LaunchOptions launch;
  c10::DeviceType device = c10::kCPU;
  bool asks_for_help = false;
  std::vector<std::string> others;
};

constexpr auto kHelp =
    "  --config FILE    the settings: DeepSpeed's JSON (docs/from_deepspeed.md); also --deepspeed and --deepspeed_config\n"
    "  --ranks N        start N local ranks; without it the environment says what rank this process is\n"
    "  --max-restarts N with --ranks: start the ranks again after a failure, which go on from the newest checkpoint; default: 0\n"
    "  --min-ranks N    each restart has a rank fewer, but at least N; default: as many as before\n"
    "  --device NAME    cpu or cuda; default: cpu\n";

int to_number(std::string_view flag, const std::string& text, int least) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  TORCH_CHECK_VALUE(error == std::errc() && end == text.data() + text.size() && number >= least, "--", flag, " is '", text,
                    "', but must be ", least > 0 ? "a positive number" : "a number that is not negative");
  return number;
}

c10::DeviceType to_device(const std::string& text) {
  TORCH_CHECK_VALUE(text == "cpu" || text == "cuda", "--device is '", text, "', but must be cpu or cuda");
  return text == "cpu" ? c10::kCPU : c10::kCUDA;
}

constexpr std::array<std::string_view, 7> kFlags{"config",    "deepspeed", "deepspeed_config", "ranks", "max-restarts",
                                                 "min-ranks", "device"};

void set(CommandLine& line, std::string_view flag, const std::string& value) {
  if (flag == "ranks") {
    line.ranks = to_number(flag, value, 1);
  } else if (flag == "max-restarts") {
    line.launch.max_restarts = to_number(flag, value, 0);
  } else if (flag == "min-ranks") {
    line.launch.min_ranks = to_number(flag, value, 0);
  } else if (flag == "device") {
    line.device = to_device(value);
  } else {
    line.config = value;
  }
}

CommandLine parse(int argc, char** argv) {
  CommandLine line;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--help" || word == "-h") line.asks_for_help = true;
    const auto equals = word.find('=');
    const auto name = word.starts_with("--") ? word.substr(2, equals == std::string::npos ? equals : equals - 2) : std::string();
    if (std::find(kFlags.begin(), kFlags.end(), name) == kFlags.end()) {
      line.others.push_back(word);
      continue;
    }
    TORCH_CHECK_VALUE(equals != std::string::npos || i + 1 < argc, word, " needs a value");
    set(line, name, equals != std::string::npos ? word.substr(equals + 1) : argv[++i]);
  }
  TORCH_CHECK_VALUE(line.ranks || line.launch.max_restarts == 0, "--max-restarts needs --ranks: other launchers have their own");
  TORCH_CHECK_VALUE(line.asks_for_help || !line.config.empty(), "--config is needed: the file with the settings of the training");
  return line;
}

void say_notes(const TrainConfig& config) {
  if (process_context().rank() != 0) return;
  for (const auto& note : config.notes) std::fprintf(stderr, "config: %s\n", note.c_str());
}

/// One rank's part.
TrainingEnd run(const CommandLine& line, const std::function<TrainingEnd(TrainSetup&)>& train) {
  init_process_group();
  auto config = TrainConfig::read(line.config, {.ranks = process_context().world_size()});
  say_notes(config);
  auto end = [&] {
    TrainSetup setup(std::move(config), line.device, line.others);
    return train(setup);
  }();
  destroy_process_group();
  return end;
}

int start(const CommandLine& line, const std::function<TrainingEnd(TrainSetup&)>& train) {
  int status = 0;
  const auto worker = [&] {
    if (run(line, train).reason == StopReason::kTerminated) status = kTerminated;
  };
  if (!line.ranks) {
    worker();
    return status;
  }
  auto options = line.launch;
  options.on_restart = [](const Restart& restart) {
    std::fprintf(stderr, "restart %d, with %d rank%s, after this: %s\n", restart.number, restart.ranks,
                 restart.ranks == 1 ? "" : "s", restart.failure.c_str());
  };
  const int of_ranks = launch(*line.ranks, worker, options);
  return of_ranks != 0 ? of_ranks : status;
}

} // namespace

int train_main(int argc, char** argv, const std::function<TrainingEnd(TrainSetup&)>& train) noexcept {
  return run_main([&] {
    const char* const name = argc > 0 ? argv[0] : "train";
    CommandLine line;
    try {
      line = parse(argc, argv);
    } catch (const c10::Error& error) {
      std::fprintf(stderr, "%s: %s\n%s", name, error.what_without_backtrace(), kHelp);
      return kUsage;
    }
    if (!line.asks_for_help) return start(line, train);
    std::printf("%s\n%s", name, kHelp);
    return 0;
  });
}

} // namespace tessera
