#pragma once

#include <sys/types.h>
#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

/// This process's environment with `additions` and without what makes it a rank, as "NAME=value".
std::vector<std::string> variables_of_child(const std::map<std::string, std::string>& additions);

/// Starts a program, which has this process's descriptors `descriptors[n]` as n, beside those that are not marked close-on-exec.
pid_t spawn_program(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
                    const std::map<int, int>& descriptors);

} // namespace tessera::testing
