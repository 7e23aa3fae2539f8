# tessera_test_program(name [SOURCES file...] [BESIDES file...] [LIBRARIES target...] [DEFINITIONS NAME=value...] [DEPENDS target...])
#
# A GoogleTest program build/<preset>/bin/tests/<name>, built on the precompiled header that all tests share, in batches. Its sources
# are SOURCES and, if these hold no *_test.cpp, every *_test.cpp of the folder and its rooms but BESIDES, which other programs have.
function(tessera_test_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;BESIDES;LIBRARIES;DEFINITIONS;DEPENDS" ${ARGN})
  if(NOT arg_SOURCES MATCHES "_test\\.cpp")
    file(GLOB_RECURSE tests CONFIGURE_DEPENDS RELATIVE "${CMAKE_CURRENT_SOURCE_DIR}" *_test.cpp)
    if(arg_BESIDES)
      list(REMOVE_ITEM tests ${arg_BESIDES})
    endif()
    list(APPEND arg_SOURCES ${tests})
  endif()
  add_executable(${name} ${arg_SOURCES})
  target_link_libraries(${name} PRIVATE tessera_test_base nlohmann_json::nlohmann_json ${arg_LIBRARIES})
  target_compile_definitions(${name} PRIVATE ${arg_DEFINITIONS})
  target_precompile_headers(${name} REUSE_FROM tessera_test_base)
  tessera_compile_in_batches(${name} 12)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin/tests")
  if(arg_DEPENDS)
    add_dependencies(${name} ${arg_DEPENDS})
  endif()
  list(TRANSFORM arg_SOURCES PREPEND "${CMAKE_CURRENT_SOURCE_DIR}/")
  set_property(TARGET ${name} PROPERTY TESSERA_TEST_FILES ${arg_SOURCES})
endfunction()

# tessera_test(name [PROGRAM program] [FILES file or room...] [RANKS n...] [SIMULATED_RANKS n...] [HOSTS layout...] [LABELS label...]
#              [TIMEOUT seconds] [ENVIRONMENT VAR=value...] [OVER_BOTH_TRANSPORTS] [ONLY_SIMULATED] [APART])
#
# ctest entries for a room of tests: `fsdp.schedule` runs the files of tests/fsdp/schedule/ in the program fsdp_tests. FILES names
# others, without endings: files, or rooms of the program. The label is the folder's name, plus LABELS.
# Without RANKS they run in one process. With RANKS, one entry runs them on so many local ranks, one world size after the other; the
# main of tests/support starts the ranks, which run all tests in lockstep. APART makes an entry of each world size, `name.<n>ranks`:
# for what takes long.
# With SIMULATED_RANKS: an entry `name.simulated` more, with the label simulated-device, which runs a few of the tests on the
# simulated device (all with TESSERA_TEST_FULL=1) on the first of these numbers of ranks. `ctest -C Full` runs the others too.
# ONLY_SIMULATED: for tests that would test nothing on the CPU, which has no entry then; on the simulated device all of them run.
# OVER_BOTH_TRANSPORTS: each entry a second time with gloo in place of shared memory, `name.gloo`.
# With HOSTS: an entry `name.hosts` more, which runs them with as many ranks as a layout has digits, that of each rank's host: all
# of them for collectives/, a few for fsdp/.
function(tessera_test name)
  cmake_parse_arguments(arg "OVER_BOTH_TRANSPORTS;ONLY_SIMULATED;APART" "PROGRAM;TIMEOUT" "FILES;RANKS;SIMULATED_RANKS;HOSTS;LABELS;ENVIRONMENT"
    ${ARGN})
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "tessera_test: these are unknown: '${arg_UNPARSED_ARGUMENTS}'")
  endif()
  string(REGEX MATCH "^([^.]+)\\.?([^.]*)" unused ${name})
  if(NOT arg_PROGRAM)
    set(arg_PROGRAM ${CMAKE_MATCH_1}_tests)
  endif()
  if(NOT arg_FILES)
    set(arg_FILES ${CMAKE_MATCH_2})
  endif()
  _tessera_register_files()
  list(JOIN arg_FILES "," files)
  set(command COMMAND ${arg_PROGRAM} --files ${files})

  set(environment ${arg_ENVIRONMENT})
  if(NOT arg_ONLY_SIMULATED)
    _tessera_add_entries(${name} "${arg_RANKS}")
    set(count TESSERA_TEST_COUNT=6)
  endif()
  if(arg_HOSTS)
    list(JOIN arg_HOSTS "," layouts)
    set(arg_ENVIRONMENT ${environment} GLOO_SOCKET_IFNAME=lo)
    if(arg_PROGRAM STREQUAL "fsdp_tests") # what differs between hosts is the collectives', which test all of it
      list(APPEND arg_ENVIRONMENT TESSERA_TEST_COUNT=12)
    endif()
    _tessera_add_test(${name}.hosts 3 ${command} --hosts ${layouts})
  endif()
  if(arg_OVER_BOTH_TRANSPORTS)
    set(ranks ${arg_RANKS})
    list(REMOVE_ITEM ranks 1) # alone a rank sends nothing
    set(arg_ENVIRONMENT ${environment} TESSERA_TRANSPORT=gloo)
    _tessera_add_entries(${name}.gloo "${ranks}")
  endif()
  if(arg_SIMULATED_RANKS)
    list(APPEND arg_LABELS simulated-device)
    set(arg_ENVIRONMENT ${environment} TESSERA_TEST_DEVICE=sim ${count})
    list(POP_FRONT arg_SIMULATED_RANKS first)
    _tessera_add_test(${name}.simulated ${first} ${command} --ranks ${first})
    if(arg_SIMULATED_RANKS)
      list(JOIN arg_SIMULATED_RANKS "," others)
      _tessera_add_test(${name}.simulated.others 3 ${command} --ranks ${others} CONFIGURATIONS Full)
    endif()
  endif()
endfunction()

# tessera_script_test(NAME name COMMAND command... [FORKS program...] [RANKS n] [LABELS label...] [TIMEOUT seconds]
#                     [ENVIRONMENT VAR=value...]):
# a ctest entry that runs a command, with the label and the environment of tessera_test. RANKS is the number of processes that the
# command starts. FORKS names targets whose files the command starts: it starts forks of them, which takes less time. It has
# them by a word that is a program's file, its folder, or the build folder.
function(tessera_script_test)
  cmake_parse_arguments(arg "" "NAME;RANKS;TIMEOUT" "COMMAND;FORKS;LABELS;ENVIRONMENT" ${ARGN})
  if(NOT arg_RANKS)
    set(arg_RANKS 1)
  endif()
  if(arg_FORKS)
    list(TRANSFORM arg_FORKS REPLACE "(.+)" "$<TARGET_FILE:\\1>")
    list(PREPEND arg_COMMAND forked_start --beside "${PROJECT_BINARY_DIR}" ${arg_FORKS} --)
  endif()
  _tessera_add_test(${arg_NAME} ${arg_RANKS} COMMAND ${arg_COMMAND})
endfunction()

# Notes which of the program's files the entries of arg_FILES run, for every_test_is_registered.
function(_tessera_register_files)
  get_property(sources TARGET ${arg_PROGRAM} PROPERTY TESSERA_TEST_FILES)
  foreach(place IN LISTS arg_FILES)
    set(found ${sources})
    list(FILTER found INCLUDE REGEX "/${place}(/|\\.cpp$)")
    if(NOT found)
      message(FATAL_ERROR "tessera_test: ${arg_PROGRAM} has no file or room '${place}'")
    endif()
    set_property(GLOBAL APPEND PROPERTY TESSERA_TEST_SOURCES ${found})
  endforeach()
endfunction()

# One entry for all of these world sizes, or one for each. Reads `command` and the arguments of its caller.
function(_tessera_add_entries name ranks)
  if(NOT ranks)
    _tessera_add_test(${name} 1 ${command})
  elseif(arg_APART)
    foreach(number IN LISTS ranks)
      _tessera_add_test(${name}.${number}ranks ${number} ${command} --ranks ${number})
    endforeach()
  else()
    # The worlds follow each other, so the entry takes what they take on average.
    list(LENGTH ranks worlds)
    list(JOIN ranks "+" sum)
    math(EXPR processors "(${sum}) / ${worlds}")
    list(JOIN ranks "," list)
    _tessera_add_test(${name} ${processors} ${command} --ranks ${list})
  endif()
endfunction()

# Reads arg_LABELS, arg_TIMEOUT and arg_ENVIRONMENT of its caller. An entry all of whose tests were skipped, with nothing after
# GoogleTest's list of them, counts as skipped.
function(_tessera_add_test name processors)
  set(cost ${arg_TIMEOUT}) # the long ones first, also before ctest has measured them
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 600)
    set(cost 0)
  endif()
  set(collective_timeout 60)
  if(TESSERA_SANITIZER) # an instrumented rank takes seconds to start alone
    math(EXPR arg_TIMEOUT "4 * ${arg_TIMEOUT}")
    set(collective_timeout 240)
  endif()
  file(RELATIVE_PATH folder "${PROJECT_SOURCE_DIR}/tests" "${CMAKE_CURRENT_SOURCE_DIR}")
  string(REGEX REPLACE "/.*" "" folder "${folder}")
  set(spin TESSERA_SPIN_MICROSECONDS=0) # entries that run at the same time need each other's cores
  if(folder STREQUAL "collectives")
    set(spin "") # they test what programs get
  endif()
  # Python compiles what it imports once, also where the caller has it keep nothing: half of an `import torch` is that.
  set(python "PYTHONPATH=path_list_prepend:${PROJECT_SOURCE_DIR}/tests/support/quick_python"
    PYTHONDONTWRITEBYTECODE=unset: "PYTHONPYCACHEPREFIX=set:${PROJECT_BINARY_DIR}/bytecode")
  add_test(NAME ${name} ${ARGN})
  set_tests_properties(${name} PROPERTIES
    SKIP_REGULAR_EXPRESSION "\\[  PASSED  \\] 0 tests\\.(\n\\[  SKIPPED \\] [^\n]*)+\n*$"
    LABELS "${folder};${arg_LABELS}" PROCESSORS ${processors} TIMEOUT ${arg_TIMEOUT} COST ${cost}
    ENVIRONMENT "OMP_NUM_THREADS=1;TESSERA_TIMEOUT_SECONDS=${collective_timeout};${spin};${TESSERA_SANITIZER_ENVIRONMENT};${arg_ENVIRONMENT}"
    ENVIRONMENT_MODIFICATION "${python}")
endfunction()
