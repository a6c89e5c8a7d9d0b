#pragma once

// Runs one test and says how long it took.
void test(const char* name, void (*run)());

void test_linear();
void test_attention();
void test_head();
