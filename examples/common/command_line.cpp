#include "common/command_line.h"

#include <absl/flags/parse.h>
#include <absl/flags/usage.h>
#include <absl/flags/usage_config.h>

#include <string_view>

namespace examples {
namespace {

// Abseil's names have underscores; the usual spelling on a command line has dashes.
void use_underscores(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::string_view argument = argv[i];
    if (argument.substr(0, 2) != "--") continue;
    if (argument == "--") return;
    char* const end = argv[i] + std::min(argument.find('='), argument.size());
    std::replace(argv[i] + 2, end, '-', '_');
  }
}

} // namespace

void parse_command_line(int argc, char** argv, const std::string& usage, const std::string& source) {
  use_underscores(argc, argv);
  absl::FlagsUsageConfig config;
  config.contains_help_flags = config.contains_helpshort_flags = [source](absl::string_view file) {
    return file.find(source) != absl::string_view::npos || file.find("common/job_options.cpp") != absl::string_view::npos;
  };
  absl::SetFlagsUsageConfig(config);
  if (absl::ProgramUsageMessage().find("never called") != absl::string_view::npos) { // it may be set only once
    absl::SetProgramUsageMessage(usage);
  }
  const auto rest = absl::ParseCommandLine(argc, argv);
  TORCH_CHECK(rest.size() == 1, "the argument '", rest[1], "' belongs to no flag (see --help)");
}

} // namespace examples
